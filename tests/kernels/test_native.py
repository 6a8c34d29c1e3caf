"""The C code of native: launches, and gradients as Python reads them."""

import ctypes
import struct
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from lossscale.torch import native  # noqa: E402
from lossscale.torch.inspection.kernels.driver import prepare_launch  # noqa: E402

DRIVER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
SIZES = {"P": 8, "i": 4, "q": 8, "f": 4, "d": 8}


@pytest.fixture
def code():
    built = native.load()
    if built is None:
        pytest.skip("native.c could not be built: there is no C compiler")
    return built


def launch(code, codes, arguments, status=0):
    """Launch by a function that reads what a driver does.

    Returns:
        The status; the numbers; and the bytes of each argument, then those of the
        memory that Triton may want.
    """
    seen = []
    sizes = [SIZES[code] for code in codes if code != "x"] + [8, 8]

    def driver(*received):
        function, *shape, stream, pointers, extra = received
        assert extra is None
        seen.append((function, shape, stream))
        seen.append([ctypes.string_at(pointers[i], x) for i, x in enumerate(sizes)])
        return status

    callback = DRIVER(driver)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    numbers = address, 2**40 + 1, 7, 128, 64, 2**41
    result = code.launch(*numbers, codes.encode(), arguments)
    return result, *seen


def test_every_argument_is_where_its_address_says(code):
    arguments = (2**63 + 8, -5, 0.1, 24, -(2**40), 0.1)
    status, (function, shape, stream), slots = launch(code, "PifPqd", arguments)
    assert (0, 2**40 + 1, 2**41) == (status, function, stream)
    assert [7, 1, 1, 128, 1, 1, 64] == shape
    expected = ["<Q", "<i", "<f", "<Q", "<q", "<d"]
    for form, number, actual in zip(expected, arguments, slots, strict=False):
        assert struct.pack(form, number) == actual
    assert [bytes(8), bytes(8)] == slots[6:]


def test_a_tensor_is_given_by_its_address(code):
    tensors = (torch.zeros(5)[2:], torch.nn.Parameter(torch.zeros(3)))
    _, _, slots = launch(code, "PP", tensors)
    assert [struct.pack("<Q", x.data_ptr()) for x in tensors] == slots[:2]


def test_what_was_compiled_into_the_kernel_is_left_out(code):
    _, _, slots = launch(code, "Pxi", (16, 1, 3))
    assert [struct.pack("<Q", 16), struct.pack("<i", 3), bytes(8), bytes(8)] == slots


def test_what_the_driver_says_is_returned(code):
    assert 719 == launch(code, "f", (float("inf"),), status=719)[0]


@pytest.mark.parametrize(
    ("codes", "arguments", "error"),
    [
        ("i", (2**31,), OverflowError),
        ("i", (-(2**31) - 1,), OverflowError),
        ("q", (2**63,), OverflowError),
        ("P", (-1,), OverflowError),
        ("P", (None,), RuntimeError),
        ("f", ("1",), TypeError),
        ("ff", (1.0,), TypeError),
        ("f" * 49, (1.0,) * 49, TypeError),
    ],
)
def test_what_cannot_be_an_argument_is_refused(code, codes, arguments, error):
    with pytest.raises(error):
        code.launch(0, 0, 1, 1, 0, 0, codes.encode(), arguments)


def test_code_that_cannot_be_built_is_tried_once_and_a_warning_says_so(monkeypatch):
    from triton.runtime import build

    monkeypatch.setattr(native, "code", None)
    monkeypatch.setattr(native, "_has_tried", False)
    monkeypatch.delattr(build, "compile_module_from_src")
    with pytest.warns(UserWarning, match="C code could not be built"):
        assert native.load() is None
    assert native.load() is None
    assert [None] == native.read_grads([torch.nn.Parameter(torch.zeros(2))])


def test_an_attribute_that_other_code_has_replaced_is_read(code, monkeypatch):
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad, other = torch.ones(2), torch.full((2,), 5.0)
    assert [param.grad] == code.read_grads([param], True)
    monkeypatch.setattr(torch.nn.Parameter, "grad", property(lambda _: other))
    (read,) = code.read_grads([param], True)
    assert read is other
    assert native.MOVED == code.compare_grads([param], code.record([torch.ones(2)]))


def test_another_version_of_triton_launches_by_itself():
    assert prepare_launch(object(), 1) is None


class Counted(torch.nn.Parameter):
    """A parameter that notes how often its gradient is read."""

    reads = 0

    @property
    def grad(self):
        Counted.reads += 1
        return super().grad


def test_the_gradients_are_read_as_python_reads_them(code):
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    params[0].grad, params[2].grad = torch.ones(2), torch.ones(2)
    every = [param.grad for param in params]
    read = code.read_grads(params, True)
    assert len(every) == len(read)
    assert all(a is b for a, b in zip(every, read, strict=True))
    present = code.read_grads(tuple(params), False)
    assert [id(every[0]), id(every[2])] == [id(grad) for grad in present]


def test_a_parameter_with_a_gradient_of_its_own_making_is_asked_for_it(code):
    assert [None] == code.read_grads([Counted(torch.zeros(2))], True)
    assert 1 == Counted.reads


@pytest.mark.parametrize("wrong", [[1], [None], [torch.zeros(2), "grad"]])
def test_what_has_no_gradient_raises_as_in_python(code, wrong):
    with pytest.raises(AttributeError, match="grad"):
        code.read_grads(wrong, True)
    with pytest.raises(TypeError, match="expected a list or a tuple"):
        code.read_grads(iter(wrong), True)


def test_gradients_are_compared_with_a_record_of_them(code):
    params = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3)]
    for param in params[1:]:
        param.grad = torch.ones(2, 2)
    record = code.record([param.grad for param in params])
    assert native.SAME == code.compare_grads(params, record)
    assert native.CHANGED == code.compare_grads(params[:2], record)
    params[1].grad = torch.ones(2, 2)
    assert native.MOVED == code.compare_grads(params, record)
    params[2].grad = torch.ones(2, 2).t().clone(memory_format=torch.preserve_format)
    assert native.CHANGED == code.compare_grads(params, record)
    params[2].grad = None
    assert native.CHANGED == code.compare_grads(params, record)
    params[0].grad = torch.ones(2, 2)
    assert native.CHANGED == code.compare_grads(params, record)


def test_nothing_is_kept_alive_by_reading_and_comparing(code):
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    record = code.record([param.grad])
    before = sys.getrefcount(param), sys.getrefcount(param.grad)
    for _ in range(100):
        code.read_grads([param], False)
        code.compare_grads([param], record)
        code.compare([param.grad], record)
        code.record([param.grad, None])
    assert before == (sys.getrefcount(param), sys.getrefcount(param.grad))
