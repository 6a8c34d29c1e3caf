"""Casts of what goes into a converted model and what it returns."""

import collections
import dataclasses
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import lossscale.torch as ls  # noqa: E402


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", 2 * self.x)


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor


class Dict(dict):
    """A dictionary that torch's pytree does not know."""


Pair = collections.namedtuple("Pair", ["x", "other"])  # noqa: PYI024

CONTAINERS = {
    "tuple": (lambda x: (x,), lambda value: value[0]),
    "list": (lambda x: [x], lambda value: value[0]),
    "namedtuple": (lambda x: Pair(x, None), lambda value: value.x),
    "nested": (lambda x: {"a": [({"b": x},)]}, lambda value: value["a"][0][0]["b"]),
    "dict": (lambda x: {"x": x}, lambda value: value["x"]),
    "dict subclass": (lambda x: Dict(x=x), lambda value: value["x"]),
    "OrderedDict": (lambda x: collections.OrderedDict(x=x), lambda value: value["x"]),
    "UserDict": (lambda x: collections.UserDict(x=x), lambda value: value["x"]),
    "dataclass": (Batch, lambda value: value.x),
    "frozen dataclass": (Frozen, lambda value: value.x),
    "dataclass with slots": (Slots, lambda value: value.x),
    "in a dataclass": (lambda x: Batch([x]), lambda value: value.x[0]),
    "namespace": (lambda x: types.SimpleNamespace(x=x), lambda value: value.x),
}


class Linear(nn.Module):
    """Takes a container, remembers what it was given, and returns one."""

    def __init__(self, pack, unpack):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.pack, self.unpack = pack, unpack
        self.given = None

    def forward(self, value):
        self.given = value
        return self.pack(self.linear(self.unpack(value)))


class Child(nn.Module):
    """The model above as a part of another one."""

    def __init__(self, pack, unpack):
        super().__init__()
        self.child = Linear(pack, unpack)
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.child.unpack(self.child(self.child.pack(x))))


@pytest.mark.parametrize("name", CONTAINERS)
def test_inputs_and_results_in_containers_are_cast(name):
    pack, unpack = CONTAINERS[name]
    model = Linear(pack, unpack)
    ls.to_float16(model)
    value = pack(torch.ones(1, 2))
    result = model(value)
    assert torch.float16 == unpack(model.given).dtype
    assert torch.float32 == unpack(result).dtype
    assert torch.float32 == unpack(value).dtype  # what the caller has is not written to
    assert type(value) is type(result)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_kept_module_gets_and_returns_containers(name):
    model = Child(*CONTAINERS[name])
    ls.to_float16(model, keep_float32=["child"])
    assert torch.float32 == model(torch.ones(1, 2)).dtype
    assert torch.float32 == model.child.unpack(model.child.given).dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_floating_point_input_is_cast(dtype):
    model = nn.Linear(2, 2)
    ls.to_float16(model)
    assert torch.float32 == model(torch.ones(1, 2, dtype=dtype)).dtype
    assert torch.float32 == model(input=torch.ones(1, 2, dtype=dtype)).dtype


def test_integers_complex_numbers_and_booleans_are_not_cast():
    dtypes = [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]

    class Model(nn.Linear):
        def forward(self, *values):
            assert dtypes == [value.dtype for value in values]

    model = Model(2, 2)
    ls.to_float16(model)
    model(*[torch.ones(2).to(dtype) for dtype in dtypes])


def test_what_has_nothing_to_cast_is_passed_on_as_it_is():
    class Model(nn.Linear):
        def forward(self, x, seen, batch, other):
            seen.append(batch)
            assert other is extra
            return super().forward(x)

    model, seen = Model(2, 2), []
    batch, extra = Batch(torch.tensor([1])), object()
    ls.to_float16(model)
    model(torch.ones(1, 2), seen, batch, extra)
    assert batch is seen[0]


def test_a_dataclass_that_contains_itself_is_visited_once():
    batch = Batch(torch.ones(1, 2))
    batch.name = batch
    model = Linear(lambda x: x, lambda value: value.x)
    ls.to_float16(model)
    model(batch)
    assert torch.float16 == model.given.x.dtype


def test_float64_results_are_not_rounded():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x).double()

    model = Model(2, 2)
    ls.to_float16(model)
    assert torch.float64 == model(torch.ones(1, 2)).dtype


def test_a_tensor_that_occurs_twice_is_cast_once():
    class Model(nn.Linear):
        def forward(self, query, *, key, other):
            assert query is key is other["key"]
            return super().forward(query)

    model, x = Model(2, 2), torch.ones(1, 2)
    ls.to_float16(model)
    model(x, key=x, other={"key": x})
