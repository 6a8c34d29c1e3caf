# SPDX-License-Identifier: Apache-2.0
"""How large an unscaled gradient may be so that a torch optimizer can hold it.

A finite gradient whose square is infinite ruins Adam's second moment for good. The
bounds here are for each parameter, in the dtype of the optimizer's state; a step with a
gradient beyond them is skipped, and leaves the scale. In float32 a gradient below 1e18
never meets them (Adagrad, which adds squares up for ever: 4e14).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lossscale.core.headroom import LARGEST, largest_square
from lossscale.torch.optim.optimizer import ScaledOptimizer

_ADDING = (torch.optim.SGD, torch.optim.ASGD, torch.optim.Adamax, torch.optim.Rprop)
"""Optimizers that never square a gradient."""

_SQUARING = (
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SparseAdam,
)
"""Optimizers that average the square of each element. Any other optimizer may add up
the squares of all elements, as norms do."""

_STEPS = 2.0**31
"""For how many steps Adagrad has headroom for the largest gradient."""

_SUMMANDS = 2.0**20
"""How many of the largest gradients an optimizer that only adds can add up."""


def find_bounds(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor]
) -> list[float]:
    """Return the largest magnitude that each parameter's gradient may have, unscaled.

    Args:
        optimizer: Whose state is to stay finite.
        params: Those of its parameters that have a gradient.
    """
    stepping = class_with_step(optimizer)
    elements = sum(map(torch.Tensor.numel, params))
    groups = {
        id(param): group
        for group in optimizer.param_groups
        for param in group["params"]
    }
    return [
        _find_bound(
            stepping, groups[id(param)], _narrowest_dtype(param, optimizer), elements
        )
        for param in params
    ]


def bounds_without_optimizer(grads: list[torch.Tensor]) -> list[float]:
    """Return the bounds where no optimizer is known.

    float16 gradients have none: what squares them may well do so in float32.
    """
    names = [_dtype_name(grad.dtype) for grad in grads]
    return [
        LARGEST[name] if name == "float16" else largest_square(name) for name in names
    ]


def class_with_step(optimizer: torch.optim.Optimizer) -> type:
    """Return the class that defines the step; a subclass may define its own."""
    bases = type(optimizer).__mro__
    step_class = next((base for base in bases if "step" in vars(base)), type(optimizer))
    if issubclass(step_class, ScaledOptimizer) and step_class.__module__ in _OURS:
        return step_class.steps_as
    return step_class


_OURS = {f"lossscale.torch.optim.{name}" for name in ("adam", "sgd")}


def _find_bound(
    stepping: type, group: Mapping[str, Any], dtype: str, elements: int
) -> float:
    """Return the bound for one parameter.

    float16 has no range for a margin: there the bound is what the moments can hold.
    """
    largest = LARGEST[dtype]
    is_narrow = dtype == "float16"
    if stepping in _ADDING:
        return largest_summand(group) if is_narrow else largest / _SUMMANDS
    if is_narrow:
        return math.sqrt(largest)
    # A quarter: weight decay may add to the gradient before it is squared.
    root = math.sqrt(largest) / 4
    if stepping in _SQUARING:
        return root
    if stepping is torch.optim.Adagrad:
        return math.sqrt(largest / _STEPS)
    return root / math.sqrt(max(1, elements))


def largest_summand(group: Mapping[str, Any]) -> float:
    """Return what a float16 momentum and a float16 weight can hold, for one step."""
    momentum, rate = group.get("momentum", 0.0), group["lr"]
    number = rate if isinstance(rate, (int, float)) else 1.0  # a tensor would wait
    gain = max(1.0, float(number)) / max(1.0 - float(momentum), math.ulp(1.0))
    return LARGEST["float16"] / (2.0 * gain)


def _narrowest_dtype(param: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
    """Return the narrowest dtype that an optimizer keeps for a parameter.

    Before the first step there is no state: it will have the dtype of the parameter.
    Ours know it before.
    """
    if isinstance(optimizer, ScaledOptimizer):
        return _dtype_name(optimizer.state_dtype(param))
    state = getattr(optimizer, "state", {}).get(param) or {}
    names = [
        _dtype_name(value.dtype)
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.shape == param.shape
    ]
    float_names = [
        name for name in names or [_dtype_name(param.dtype)] if name in LARGEST
    ]
    return min(float_names or ["float32"], key=LARGEST.__getitem__)


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a real dtype; of a complex one, that of its parts."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return str(real).removeprefix("torch.")
