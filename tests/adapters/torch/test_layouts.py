"""Whether a layout is the same: the host's code in C, torch's guard, and neither."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from lossscale.torch import native  # noqa: E402
from lossscale.torch.inspection import layout_cache  # noqa: E402
from lossscale.torch.inspection.layout_cache import (  # noqa: E402
    Placement,
    layout_of,
    version_of,
)


@pytest.fixture(params=["record", "guard", "without"])
def way(request, monkeypatch):
    """Choose the host's code, torch's guard, or the way without them."""
    takes_record = request.param == "record"
    monkeypatch.setattr(
        layout_cache.kernel_backend, "is_usable", lambda _: takes_record
    )
    if takes_record:
        pytest.importorskip("triton", reason="triton is not installed")
        if native.load() is None:
            pytest.skip("native.c could not be built: there is no C compiler")
    guard = layout_cache._try_guard()
    if request.param == "guard" and guard is None:
        pytest.skip("this torch has no guard that sees every difference")
    chosen = None if request.param == "without" else guard
    monkeypatch.setattr(layout_cache, "_tried", [chosen])
    return request.param


class Layout:
    """A layout that knows how many tensors it is of, as a group of gradients does."""

    def __init__(self, tensors):
        self._layout, self._count = layout_of(tensors), len(tensors)
        self.way = WAYS.get(type(self._layout), "guard")

    def fits(self, tensors):
        # The guard and the fingerprint are asked about as many tensors only.
        return len(tensors) == self._count and self._layout.check(*tensors)


WAYS = {
    layout_cache.AddressedLayout: "record",
    layout_cache._Fingerprint: "without",
}


class Subclass(torch.Tensor):
    """A kind of tensor of its own."""


def first():
    return [torch.zeros(2, 3), torch.zeros(4)]


SAME = {
    "the same kind": first,
    "other numbers": lambda: [torch.ones(2, 3), torch.full((4,), float("nan"))],
    "a view with an offset": lambda: [torch.zeros(7)[1:].view(2, 3), torch.zeros(4)],
    "parts of one storage": lambda: [
        torch.zeros(10)[:6].view(2, 3),
        torch.zeros(10)[6:],
    ],
}
OTHER = {
    "another shape": lambda: [torch.zeros(3, 2), torch.zeros(4)],
    "more dimensions": lambda: [torch.zeros(2, 3), torch.zeros(4, 1)],
    "another size": lambda: [torch.zeros(2, 3), torch.zeros(5)],
    "no number": lambda: [torch.zeros(2, 3), torch.zeros(0)],
    "other strides": lambda: [torch.zeros(3, 2).t(), torch.zeros(4)],
    "gaps": lambda: [torch.zeros(2, 6)[:, ::2], torch.zeros(4)],
    "expanded": lambda: [torch.zeros(3).expand(2, 3), torch.zeros(4)],
    "float16": lambda: [torch.zeros(2, 3), torch.zeros(4).half()],
    "bfloat16": lambda: [torch.zeros(2, 3), torch.zeros(4).bfloat16()],
    "float64": lambda: [torch.zeros(2, 3).double(), torch.zeros(4)],
    "complex": lambda: [torch.zeros(2, 3), torch.zeros(4, dtype=torch.complex64)],
    "another device": lambda: [torch.zeros(2, 3, device="meta"), torch.zeros(4)],
    "sparse": lambda: [torch.zeros(2, 3).to_sparse(), torch.zeros(4)],
    "compressed": lambda: [torch.zeros(2, 3).to_sparse_csr(), torch.zeros(4)],
    "a subclass": lambda: [torch.zeros(2, 3).as_subclass(Subclass), torch.zeros(4)],
    "a parameter": lambda: [torch.nn.Parameter(torch.zeros(2, 3)), torch.zeros(4)],
    "fewer": lambda: first()[:1],
    "none": list,
    "more": lambda: [*first(), torch.zeros(4)],
    "the other order": lambda: first()[::-1],
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_a_layout_fits_what_is_laid_out_alike_and_nothing_else(way, name):
    layout = Layout(first())
    assert way == layout.way
    assert layout.fits(first())
    assert (name in SAME) == layout.fits((SAME | OTHER)[name]())
    assert layout.fits(first())  # and checking others changes nothing


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", OTHER)
def test_a_layout_of_any_kind_fits_its_own_and_not_the_first(way, name):
    make = OTHER[name]
    layout = Layout(make())
    assert layout.fits(make())
    assert not layout.fits(first())


def test_a_replaced_storage_of_the_same_layout_fits(way):
    tensors = first()
    layout = Layout(tensors)
    place = tensors[0].data_ptr()
    tensors[0].set_(torch.ones(6).untyped_storage(), 0, (2, 3), (3, 1))
    assert place != tensors[0].data_ptr()
    assert layout.fits(tensors)


def test_a_tensor_that_changed_in_place_does_not_fit(way):
    tensors = first()
    layout = Layout(tensors)
    tensors[0].resize_(3, 3)
    assert not layout.fits(tensors)


def test_a_layout_of_one_tensor_twice_fits_it_and_two_of_its_kind(way):
    tensor = torch.zeros(4)
    layout = Layout([tensor, tensor])
    assert ("record" if way == "record" else "without") == layout.way
    assert layout.fits([tensor, tensor])
    assert layout.fits([torch.zeros(4), torch.zeros(4)])
    assert not layout.fits([torch.zeros(4), torch.zeros(5)])


# Where the two differ, the guard is the stricter: the gradients are sorted once more.


def test_one_tensor_twice_in_place_of_two_is_grouped_again_by_the_guard(way):
    tensor = torch.zeros(4)
    layout = Layout([torch.zeros(4), torch.zeros(4)])
    assert (way != "guard") == layout.fits([tensor, tensor])
    assert Layout([tensor, tensor]).fits([tensor, tensor])


def test_a_gradient_with_a_graph_is_grouped_again_by_the_guard(way):
    with_graph = [torch.zeros(2, 3, requires_grad=True), torch.zeros(4)]
    assert (way != "guard") == Layout(first()).fits(with_graph)
    assert Layout(with_graph).fits(with_graph)


def test_what_the_guard_sees_of_the_surroundings_settles_when_they_stay(way):
    with torch.autocast("cpu"):
        inside = Layout(first())
        assert inside.fits(first())
    with torch.inference_mode():
        made = first()
        inside = Layout(made)
        assert inside.fits(first())
    with torch.no_grad():
        assert Layout(first()).fits(first())


# Addresses, which the host's code compares as well.


def layout_of_record(tensors):
    layout = layout_of(tensors)
    assert isinstance(layout, layout_cache.AddressedLayout)
    return layout


@pytest.mark.parametrize("way", ["record"], indirect=True)
def test_a_version_stays_as_long_as_the_addresses_do(way):
    tensors = first()
    layout = layout_of_record(tensors)
    version = version_of(layout)
    assert layout.check(tensors[0].view(2, 3), tensors[1])
    assert version == version_of(layout)
    assert layout.check(*first())  # the first ones still have their memory
    assert version != (moved := version_of(layout))
    assert not layout.check(torch.zeros(3, 2), tensors[1])
    assert moved == version_of(layout)
    assert layout.check(*tensors)
    assert version_of(layout) not in (version, moved)
    assert version_of(layout) != version_of(layout_of_record(tensors))


@pytest.mark.parametrize("way", ["record"], indirect=True)
def test_a_record_is_of_all_tensors_and_of_no_more(way):
    layout = layout_of_record(first())
    assert not layout.check(*first()[:1])
    assert not layout.check(*first(), torch.zeros(1))
    assert not layout.check()
    assert not layout.check(None, torch.zeros(4))
    assert layout_of_record([torch.zeros(())]).check(torch.zeros(()))


@pytest.mark.parametrize("way", ["record"], indirect=True)
@pytest.mark.parametrize("kind", ["negated", "conjugated", "of a subclass"])
def test_what_the_hosts_code_cannot_see_is_compared_otherwise(way, kind):
    number = torch.zeros(1, dtype=torch.complex64).conj()
    tensor = {
        "negated": number.imag,
        "conjugated": number,
        "of a subclass": torch.zeros(1).as_subclass(Subclass),
    }[kind]
    assert not isinstance(layout_of([tensor]), layout_cache.AddressedLayout)


def test_a_placement_is_of_tensors_where_they_are(way):
    tensors = first()
    placement = Placement(tensors)
    assert placement.is_same(tensors)
    assert placement.is_same([tensors[0].data, tensors[1].view(4)])
    assert not placement.is_same(first())
    assert placement.is_same(tensors)
    tensors[1].data = torch.zeros(4)
    assert not placement.is_same(tensors)


def test_the_guard_is_tried_before_it_is_trusted(monkeypatch):
    class Blind:
        """A guard that sees no difference."""

        def __init__(self, *tensors, **sizes):
            pass

        def check(self, *tensors):
            return True

    guards = pytest.importorskip(
        "torch._C._dynamo.guards", reason="this torch has no guards in C++"
    )
    monkeypatch.setattr(guards, "TensorGuards", Blind)
    assert layout_cache._try_guard() is None
    monkeypatch.delattr(guards, "TensorGuards")
    assert layout_cache._try_guard() is None


def test_the_guard_is_searched_once(monkeypatch):
    asked = []
    monkeypatch.setattr(layout_cache, "_tried", [])
    monkeypatch.setattr(layout_cache, "_try_guard", lambda: asked.append(1))
    for _ in range(3):
        assert Layout(first()).fits(first())
    assert [1] == asked
