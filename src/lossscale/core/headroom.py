# SPDX-License-Identifier: Apache-2.0
"""How large a gradient may be so that the rest of the step can hold it.

A finite gradient can still become infinite on its way into the weights: replicas and
micro-batches are added up, norms and moments are squares. No check comes after the
finite check, so a step with a gradient beyond these bounds is skipped there. The bounds
are known before the step; comparing with them costs nothing.

A sum over replicas or micro-batches that overflows while it carries the scale is an
overflow, and lowers the scale. An unscaled gradient that the optimizer cannot square is
`Signal.too_large`, and leaves the scale: no lower scale makes a true gradient smaller.
"""

import math
from typing import Any

from lossscale.core.checks import FLOAT32_MAX

LARGEST = {
    "float16": 65504.0,
    "bfloat16": math.ldexp(255.0, 120),
    "float32": FLOAT32_MAX,
    "float64": math.ldexp(2.0 - 2.0**-52, 1023),
}
"""The largest number of each dtype that a gradient may have."""

NARROW = ("float16", "bfloat16")
"""The dtypes in which small numbers vanish or lose digits."""

_UNIT = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}
"""How far apart the numbers from 1 to 2 are."""

_LINEAR = frozenset({"SGD", "Lion", "GradientDescentOptimizer", "MomentumOptimizer"})
"""Optimizers that never square a gradient, by name."""


def largest_square(dtype: str) -> float:
    """Return the largest magnitude whose square is a number of a dtype.

    The bound where the optimizer is not known.
    """
    return math.sqrt(LARGEST[dtype])


def largest_sum(dtype: str, addends: Any) -> Any:
    """Return what a sum may be exactly and still not be rounded up to infinity."""
    return LARGEST[dtype] / (1.0 + (addends - 1) * _UNIT[dtype])


def largest_addend(dtype: str, addends: int) -> float:
    """Return the largest number that may be added up so often, rounded each time."""
    return float(largest_sum(dtype, addends)) / addends


def largest_square_root(inner: Any, dtype: str, elements: int) -> float:
    """Return the largest magnitude that an optimizer can square and add up.

    An infinite second moment never comes back: its weight stands still for ever (Adam)
    or is NaN (Adafactor). A norm over all gradients adds up all their squares. An
    optimizer that is not known is taken to square.

    Args:
        inner: The optimizer.
        dtype: That of the gradient.
        elements: How many numbers the optimizer updates.
    """
    by_norm = _bound(inner, "clipnorm") or _bound(inner, "global_clipnorm")
    # Moments are squares of one number each. In float32 there is room enough to bound
    # their sum as well, which some optimizers take; in float16 there is not.
    terms = 1 if dtype in NARROW and not by_norm else max(1, elements)
    root = math.sqrt(LARGEST[dtype] / terms)
    harmless = is_linear(inner) or 0.0 < _bound(inner, "clipvalue") <= root
    return math.inf if harmless and not by_norm else root


def clip(inner: Any) -> float:
    """Return what an optimizer clips gradients to; 0 if it does not."""
    names = ("clipnorm", "global_clipnorm", "clipvalue")
    return min((bound for name in names if (bound := _bound(inner, name))), default=0.0)


def largest_moment(inner: Any, dtype: str) -> float:
    """Return the largest number of a dtype that an optimizer can keep in it."""
    return LARGEST[dtype] if is_linear(inner) else math.sqrt(LARGEST[dtype])


def is_linear(inner: Any) -> bool:
    """Whether an optimizer never squares a gradient, as far as is known.

    The class that has the update decides: a subclass with one of its own is not known.
    """
    for base in type(inner).__mro__:
        if {"update_step", "_resource_apply_dense"} & vars(base).keys():
            return base.__name__ in _LINEAR
    return False


def accumulated(inner: Any) -> int:
    """Return how many micro-batches an optimizer adds up before a step."""
    return int(_setting(inner, "gradient_accumulation_steps") or 1)


def _bound(inner: Any, name: str) -> float:
    """Return what an optimizer clips to; 0 where it does not, or is not asked to."""
    return max(0.0, float(_setting(inner, name) or 0.0))


def _setting(inner: Any, name: str) -> Any:
    """Return a setting that not every optimizer has."""
    return getattr(inner, name, None)
