# SPDX-License-Identifier: Apache-2.0
"""How large a result would have been: the operator once more, in float64."""

import math
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from lossscale.torch.explain.kinds import numbers_of


def measure_wide(
    func: Any, args: Any, kwargs: dict[str, Any], output: int
) -> float | None:
    """Return the largest magnitude that an operator gives in float64.

    Args:
        func: The operator.
        args: What it was called with, before it wrote anything.
        kwargs: The same, by name.
        output: Which of its results.

    Returns:
        The magnitude; infinite if it is not finite there either, NaN if it is NaN, and
        `None` if the operator cannot run there.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:  # it would draw random numbers
        return None
    try:
        wide_args, wide_kwargs = tree_map(_widen, (args, kwargs))
        results, _ = tree_flatten(func(*wide_args, **wide_kwargs))
        numbers = numbers_of(results[output])
    # No operator is needed to run in float64: it then says nothing.
    except Exception:  # noqa: BLE001
        return None
    if numbers is None:
        return None
    return float(numbers.abs().max()) if not numbers.isnan().any() else math.nan


def _widen(value: Any) -> Any:
    """Return a tensor in float64, a dtype as float64, and anything else as it is."""
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            return value.to(torch.complex128)
        return value.double() if value.is_floating_point() else value.clone()
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value
