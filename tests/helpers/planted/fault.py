"""`Fault`: a model, a step that fails, and what an explanation must say of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Fault:
    """One planted fault; `build` returns the model and a function of one scaler."""

    name: str
    build: Callable[[], tuple[nn.Module, Callable]]
    """Returns the model, and a function that runs one step with a given scaler."""
    module: str | None
    """The module that is at fault; `None` for code outside the model."""
    direction: str
    """In which pass it is seen first: "given", "forward" or "backward"."""
    origin: str
    operation: str | None
    """ATen's name of the operation; `None` if none is to blame."""
    helps: bool
    """Whether a lower scale gives finite gradients."""
    role: str | None = None
    """What the tensor is, where it is expected to be known."""
    tensor: str | None = None
    nan: tuple[str | None, str] | None = None
    """Module and origin of the first NaN, where it comes later than the cause."""
    node: str | None = None
    micro_batch: int | None = None
    loss: int | None = None
    scale: float = 65536.0


FAULTS: list[Fault] = []
"""Every fault, in the order of the table."""


def plant(module, direction, origin, operation, *, helps=False, **more):
    """Add a function that builds a model and its step to the table."""

    def add(build):
        name = build.__name__.replace("_", " ")
        fault = Fault(name, build, module, direction, origin, operation, helps, **more)
        FAULTS.append(fault)
        return build

    return add


def autocast_step(model, batch, loss_of=None):
    """Return a step under autocast: forward, loss in float32, backward."""

    def step(scaler):
        with torch.autocast("cpu", torch.float16):
            output = model(batch)
        loss = mean_square(output) if loss_of is None else loss_of(output)
        scaler.scale(loss).backward()

    return step


def plain_step(model, batch, loss_of=None):
    """Return a step without autocast: of a float32 or a converted model."""

    def step(scaler):
        output = model(batch)
        loss = mean_square(output) if loss_of is None else loss_of(output)
        scaler.scale(loss).backward()

    return step


def mean_square(output):
    return output.float().pow(2).mean()


class Block(nn.Module):
    """A model of three parts, of which the middle one is a given function's."""

    def __init__(self, function, width=8):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.middle = Middle(function)
        self.head = nn.Linear(width, width)

    def forward(self, x):
        return self.head(self.middle(self.embed(x)))


class Middle(nn.Module):
    """A function of what it is given, with a weight of its own."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight)


def normal_batch(rows=4, width=8):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
