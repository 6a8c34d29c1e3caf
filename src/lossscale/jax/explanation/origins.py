# SPDX-License-Identifier: Apache-2.0
"""What an equation did to make a number that is not finite.

Each question is asked of the equation's own inputs. The names are those of JAX's
primitives.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin
from lossscale.jax.explanation.values import Value

if TYPE_CHECKING:
    from lossscale.core.explanation.evaluated import Node


def find_origin(
    name: str, inputs: Sequence[Value], kind: Kind, *, wide: float | None
) -> Origin:
    """Return what an equation did whose inputs were finite.

    Args:
        name: The name of its primitive.
        inputs: What it read.
        kind: What its result has that is not finite.
        wide: The largest magnitude of the result in a wider format, if it is known.
    """
    arrays = [value.array for value in inputs]
    if name in _QUESTIONS:
        found = _QUESTIONS[name](arrays, kind)
        if found is not None:
            return found
    if name in _OF_A_DOMAIN:
        return "outside the domain"
    if name in _GROWING and (not kind.nan or wide is not None):
        return "overflow"
    # Sums that overflowed in both directions on the way.
    return "inf - inf" if kind.nan and name in _SUMMING else "unknown"


def find_origin_of_nan(name: str, inputs: Sequence[Value]) -> Origin:
    """Return how an equation made a NaN of infinities."""
    if name == "sub" and any(map(_is_masked_row, inputs)):
        return "row of -inf"
    if name in ("mul", "integer_pow"):
        return "inf * 0"
    if name == "div":
        return "inf / inf"
    if name in _BILINEAR:
        return "inf * 0" if _has_zero(inputs) else "inf - inf"
    if name in ("sin", "cos", "tan", "rem", *_OF_A_DOMAIN):
        return "outside the domain"
    return "inf - inf"


def find_lost_epsilon(name: str, inputs: Sequence[Value], array: Any) -> float | None:
    """Return a number that was added to a result, and that its format rounds to 0.

    It is looked for in sums with a literal, in what is 0 where they are, and in what
    divides by those.
    """
    if name == "add" and str(array.dtype) in _SMALLEST:
        for value in inputs:
            is_number = value.node is None and jnp.size(value.array) == 1
            number = abs(float(value.array)) if is_number else math.inf
            if number <= _SMALLEST[str(array.dtype)] / 2:
                return number
    if name not in _PASSING or not inputs:
        return None
    node = inputs[-1].node  # the divisor
    return None if node is None else node.lost_epsilon


_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}
"""The smallest positive numbers of formats."""

_PASSING = frozenset(
    {
        *("sqrt", "rsqrt", "div", "log", "broadcast_in_dim", "reshape", "squeeze"),
        *("convert_element_type", "copy", "integer_pow", "pow"),
    }
)


def _is_masked_row(value: Value) -> bool:
    """Whether a value is the maximum of rows of which one is -inf entirely."""
    node: Node | None = value.node
    while node is not None and node.operation in _MOVING:
        node = node.bad_parents[0] if node.bad_parents else None
    is_maximum = node is not None and node.operation in ("reduce_max", "argmax")
    return is_maximum and value.kind is not None and value.kind.is_mask


def _has_zero(inputs: Sequence[Value]) -> bool:
    return any(
        bool((value.array == 0).any()) for value in inputs[:2] if value.kind is None
    )


def _ask_division(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    numerator, divisor = arrays
    zero = divisor == 0
    if not bool(jnp.any(zero)):
        return None
    if kind.nan and bool(jnp.any((numerator == 0) & zero)):
        return "0 / 0"
    return "division by zero"


def _ask_root(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    if kind.nan:
        return "root of a negative number"
    return "division by zero" if bool(jnp.any(arrays[0] == 0)) else None


def _ask_power(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    if kind.nan:
        return "negative base"
    base, exponent = arrays
    is_pole = jnp.any((base == 0) & (exponent < 0))
    return "division by zero" if bool(is_pole) else None


def _ask_whole_power(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    del kind
    return None if bool(jnp.all(arrays[0] != 0)) else "division by zero"


def _ask_logarithm(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    del arrays
    return "log of a negative number" if kind.nan else "log of 0"


_QUESTIONS: dict[str, Callable[[Sequence[Any], Kind], Origin | None]] = {
    "div": _ask_division,
    "rsqrt": _ask_root,
    "sqrt": _ask_root,
    "cbrt": _ask_root,
    "pow": _ask_power,
    "integer_pow": _ask_whole_power,
    "log": _ask_logarithm,
    "log1p": _ask_logarithm,
}
"""What to ask of an equation's inputs if all of them are finite."""

_OF_A_DOMAIN = frozenset(
    {"acos", "asin", "atanh", "acosh", "erf_inv", "lgamma", "digamma", "rem", "tan"}
)

_BILINEAR = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

_SUMMING = frozenset({*_BILINEAR, "reduce_sum", "cumsum", "reduce_window_sum"})

_GROWING = frozenset(
    {
        *_BILINEAR,
        *("mul", "add", "sub", "add_any", "div", "exp", "exp2", "expm1", "square"),
        *("integer_pow", "pow", "convert_element_type", "reduce_precision", "sinh"),
        *("cosh", "rsqrt", "neg", "cumsum", "cumprod", "cumlogsumexp", "reduce_sum"),
        *("reduce_prod", "reduce_window_sum", "scatter-add", "scatter_add"),
        *("scatter_mul", "psum", "psum_invariant", "psum2", "reduce_scatter"),
        *("conv_transpose", "select_and_scatter_add", "logistic", "abs"),
    }
)
"""Equations whose result can be larger than what they read."""

_MOVING = frozenset(
    {
        *("broadcast_in_dim", "reshape", "squeeze", "stop_gradient", "transpose"),
        *("convert_element_type", "max", "copy", "copy_p", "pjit", "jit"),
    }
)
"""Equations that only move numbers, on the way from a row's maximum to where it is
subtracted."""
