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
from collections.abc import Iterable
from typing import Any

from lossscale.core.validation import FLOAT32_MAX
from lossscale.errors import SettingError

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

_LINEAR = frozenset(
    {
        "SGD",
        "Lion",
        "GradientDescentOptimizer",
        "MomentumOptimizer",
        "ProximalGradientDescentOptimizer",
    }
)
"""Optimizers that never square a gradient, by name."""

_ACCUMULATING = frozenset(
    {
        "Adagrad",
        "Ftrl",
        "AdagradOptimizer",
        "AdagradDAOptimizer",
        "FtrlOptimizer",
        "ProximalAdagradOptimizer",
    }
)
"""Optimizers that add up squares without decay, by name."""

_AVERAGING = frozenset(
    {
        "Adadelta",
        "Adam",
        "Adamax",
        "Lamb",
        "Nadam",
        "RMSprop",
        "ScheduleFreeAdamW",
        "AdadeltaOptimizer",
        "AdamOptimizer",
        "RMSPropOptimizer",
    }
)
"""Optimizers that average the squares of each number over steps, by name."""

_DIVIDING = frozenset(
    {
        "Adadelta",
        "Adafactor",
        "Adam",
        "Adamax",
        "Lamb",
        "Nadam",
        "ScheduleFreeAdamW",
        "AdadeltaOptimizer",
        "AdamOptimizer",
    }
)
"""Optimizers that divide by a root of averaged squares plus an epsilon, by name."""

_LIBRARIES = frozenset({"keras", "tf_keras", "tensorflow", "torch"})
"""Where a name in these sets must come from."""


def largest_square(dtype: str) -> float:
    """Return the largest magnitude whose square a dtype can represent.

    The bound for an unknown optimizer.
    """
    return math.sqrt(LARGEST[dtype])


def largest_sum(dtype: str, addends: Any) -> Any:
    """Return the largest exact sum that is not rounded up to infinity."""
    return LARGEST[dtype] / (1.0 + (addends - 1) * _UNIT[dtype])


def largest_addend(dtype: str, addends: int) -> float:
    """Return the largest number that may be added up so often, rounded each time."""
    return float(largest_sum(dtype, addends)) / addends


def largest_square_root(inner: Any, dtype: str, elements: int) -> float:
    """Return the largest magnitude that an optimizer can square and add up.

    An infinite second moment never comes back: its weight never changes again (Adam)
    or is NaN (Adafactor). A norm over all gradients adds up all their squares. An
    unknown optimizer is assumed to square.

    Args:
        inner: The optimizer.
        dtype: That of the gradient.
        elements: How many numbers the optimizer updates.
    """
    by_norm = _bound(inner, "clipnorm") or _bound(inner, "global_clipnorm")
    # Moments are squares of one number each. float32 is wide enough to bound
    # their sum as well, which some optimizers take; float16 is not.
    terms = 1 if dtype in NARROW and not by_norm else max(1, elements)
    root = math.sqrt(LARGEST[dtype] / terms)
    harmless = _kind(inner) in _LINEAR or 0.0 < _bound(inner, "clipvalue") <= root
    return math.inf if harmless and not by_norm else root


def largest_gradient(
    inner: Any, gradient: str, variable: str, *, elements: int, addends: int = 1
) -> float:
    """Return the largest unscaled gradient that an optimizer can take, for ever.

    However many such gradients arrive, the norm that it clips by, its state and the
    weights stay finite, as long as its learning rate is an ordinary one. In float16,
    where numbers end at 65504, that holds of its state; weights have to bear one step.

    Args:
        inner: The optimizer.
        gradient: The dtype in which it is given the gradient.
        variable: The dtype of the variable and of the optimizer's state.
        elements: How many numbers the optimizer updates.
        addends: Over how many replicas and micro-batches the gradient is added up.
    """
    limit = largest_addend(gradient, addends)
    if _bound(inner, "clipnorm") or _bound(inner, "global_clipnorm"):
        limit = min(limit, math.sqrt(LARGEST[gradient] / max(1, elements)) / addends)
    narrower = variable if _is_narrower(variable, gradient) else gradient
    state = _largest_for_state(inner, narrower, elements)
    if 0.0 < clip_bound(inner) <= state:
        return limit  # whatever the gradient is, no more than that reaches the state
    return min(limit, state / addends)


def check_epsilon(inner: Any, dtypes: Iterable[str]) -> None:
    """Raise if an optimizer would divide by an epsilon that is 0 in float16.

    The square of a gradient below 2**-12 is 0 there, too: the weight becomes NaN.

    Args:
        inner: The optimizer.
        dtypes: Those of the variables that it updates.

    Raises:
        SettingError: If it would.
    """
    kind = _kind(inner)
    if kind not in _DIVIDING or "float16" not in dtypes:
        return
    name = "epsilon_1" if kind == "Adafactor" else "epsilon"
    epsilon = _setting(inner, name)
    epsilon = _setting(inner, "_epsilon") if epsilon is None else epsilon
    # Adamax multiplies it by 1 - beta_1 before it divides.
    factor = 1.0 - _plain(inner, "beta_1", 0.9) if kind == "Adamax" else 1.0
    if isinstance(epsilon, (int, float)) and epsilon * factor <= 2.0**-25:
        message = (
            f"{name}={epsilon!r} is 0 in float16, and a variable is float16: "
            f"{type(inner).__name__} would divide by zero. Pass {name}=1e-4, or keep "
            "the variables in float32, as the policy mixed_float16 does."
        )
        raise SettingError(message)


def _plain(inner: Any, name: str, usual: float) -> float:
    """Return a setting that is a plain number; the usual one where it is not."""
    value = _setting(inner, name)
    return float(value) if isinstance(value, (int, float)) else usual


def largest_endless_addend(dtype: str) -> float:
    """Return the largest number that can be added up any number of times.

    A sum in which there are so many of them that one more is less than half of its last
    digit does not change any more.
    """
    return LARGEST[dtype] * _UNIT[dtype] / 8.0


def _largest_for_state(inner: Any, dtype: str, elements: int) -> float:
    """Return the largest number that an optimizer can keep in its state, for ever."""
    kind = _kind(inner)
    if kind in _LINEAR:
        # Weights are sums of gradients times a learning rate, which may be up to 64.
        endless = largest_endless_addend(dtype) / 64.0
        return (LARGEST[dtype] if dtype == "float16" else endless) / _gain(inner)
    if kind in _ACCUMULATING:
        return math.sqrt(largest_endless_addend(dtype))
    if kind in _AVERAGING or dtype == "float16":
        return largest_square(dtype)
    # Norms: squares of a whole variable are added up.
    return math.sqrt(LARGEST[dtype] / max(1, elements)) / _gain(inner)


def _is_narrower(dtype: str, limit: str) -> bool:
    """Whether a dtype ends before another one."""
    return LARGEST.get(dtype, math.inf) < LARGEST[limit]


def _gain(inner: Any) -> float:
    """Return how much larger than a gradient the momentum of an optimizer can be."""
    momentum = _setting(inner, "_momentum")  # TensorFlow 1; a flag in tf_keras's legacy
    if momentum is None:
        momentum = _setting(inner, "momentum")
    if momentum is None or momentum is False:
        return 1.0
    if momentum is True or not isinstance(momentum, (int, float)):
        return _USUAL_GAIN  # a variable, whose value it would take time to read
    return 1.0 / max(1.0 - float(momentum), 2.0**-10)


_USUAL_GAIN = 16.0


def clip_bound(inner: Any) -> float:
    """Return what an optimizer clips gradients to; 0 if it does not."""
    names = ("clipnorm", "global_clipnorm", "clipvalue")
    # No `:=`: AutoGraph, which may convert this function, warns that it cannot.
    bounds = [_bound(inner, name) for name in names]
    return min((bound for bound in bounds if bound), default=0.0)


def _kind(inner: Any) -> str:
    """Return the name of the class that has the update, if a library's; else "".

    A subclass with an update of its own is not known, whatever its name.
    """
    for base in type(inner).__mro__:
        if {"update_step", "_resource_apply_dense"} & vars(base).keys():
            is_familiar = base.__module__.partition(".")[0] in _LIBRARIES
            return base.__name__ if is_familiar else ""
    return ""


def accumulation_steps(inner: Any) -> int:
    """Return how many micro-batches an optimizer adds up before a step."""
    return int(_setting(inner, "gradient_accumulation_steps") or 1)


def _bound(inner: Any, name: str) -> float:
    """Return the value of a clipping setting; 0 if it is absent or off."""
    return max(0.0, float(_setting(inner, name) or 0.0))


def _setting(inner: Any, name: str) -> Any:
    """Return a setting, or `None` if the optimizer does not have it."""
    return getattr(inner, name, None)
