# SPDX-License-Identifier: Apache-2.0
"""How large an unscaled gradient may be so that a torch optimizer can hold it.

A finite gradient whose square is infinite ruins Adam's second moment for good. The
bounds here are for each parameter, in the dtype of the optimizer's state; a step with a
gradient beyond them is skipped, and leaves the scale. In float32 a gradient below 1e18
never meets them (Adagrad, which adds squares for ever: 4e14).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lossscale.core.headroom import LARGEST, largest_square

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
"""Optimizers that average the square of each number. All others are taken to add up
the squares of all numbers, as norms do."""

_STEPS = 2.0**31
"""For how many steps Adagrad has headroom for the largest gradient."""

_SUMMANDS = 2.0**20
"""How many of the largest gradients an optimizer that only adds can add up."""


def bounds(optimizer: Any, parameters: list[Any]) -> list[float]:
    """Return the largest magnitude that each parameter's gradient may have, unscaled.

    Args:
        optimizer: Whose state is to stay finite.
        parameters: Those of its parameters that have a gradient.
    """
    updating = updating_class(optimizer)
    elements = sum(map(torch.Tensor.numel, parameters))
    groups = {
        id(parameter): group
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    state = getattr(optimizer, "state", {})
    return [
        _bound(
            updating, groups[id(parameter)], _state_dtype(parameter, state), elements
        )
        for parameter in parameters
    ]


def bounds_of_unknown(gradients: list[Any]) -> list[float]:
    """Return the bounds where no optimizer is known.

    float16 gradients have none: what squares them may well do so in float32.
    """
    names = [_name(gradient.dtype) for gradient in gradients]
    return [
        LARGEST[name] if name == "float16" else largest_square(name) for name in names
    ]


def updating_class(optimizer: Any) -> Any:
    """Return the class that has the step; a subclass may have its own."""
    bases = type(optimizer).__mro__
    return next((base for base in bases if "step" in vars(base)), type(optimizer))


def _bound(updating: Any, group: Mapping[str, Any], dtype: str, elements: int) -> float:
    """Return the bound for one parameter.

    float16 has too little room for a margin: there the bound is what the moments
    themselves can hold.
    """
    largest = LARGEST[dtype]
    narrow = dtype == "float16"
    if updating in _ADDING:
        return _largest_summand(group) if narrow else largest / _SUMMANDS
    if narrow:
        return math.sqrt(largest)
    # A quarter: weight decay may add to the gradient before it is squared.
    root = math.sqrt(largest) / 4
    if updating in _SQUARING:
        return root
    if updating is torch.optim.Adagrad:
        return math.sqrt(largest / _STEPS)
    return root / math.sqrt(max(1, elements))


def _largest_summand(group: Mapping[str, Any]) -> float:
    """Return what a float16 momentum and a float16 weight can bear, for one step."""
    momentum, rate = group.get("momentum", 0.0), group["lr"]
    known = rate if isinstance(rate, (int, float)) else 1.0  # a tensor would wait
    gain = max(1.0, float(known)) / max(1.0 - float(momentum), math.ulp(1.0))
    return LARGEST["float16"] / (2.0 * gain)


def _state_dtype(parameter: Any, state: Mapping[Any, Any]) -> str:
    """Return the narrowest dtype that an optimizer keeps for a parameter.

    Before the first step there is no state: it takes the dtype of the parameter.
    """
    kept = state.get(parameter) or {}
    names = [
        _name(value.dtype)
        for value in kept.values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    names = names or [_name(parameter.dtype)]
    known = [name for name in names if name in LARGEST]
    return min(known or ["float32"], key=LARGEST.__getitem__)


def _name(dtype: Any) -> str:
    """Return the name of a real dtype; of a complex one, that of its parts."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return str(real).removeprefix("torch.")
