# SPDX-License-Identifier: Apache-2.0
"""What an operation of TensorFlow did to make a number that is not finite."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin


def find_origin(
    name: str, arrays: Sequence[Any], kind: Kind, *, wide: float | None
) -> Origin:
    """Return what an operation did whose inputs were finite.

    Args:
        name: TensorFlow's name of it.
        arrays: What it read.
        kind: What its result has that is not finite.
        wide: The largest magnitude of the result in float64, if it is known.
    """
    if name in _QUESTIONS:
        found = _QUESTIONS[name](arrays, kind)
        if found is not None:
            return found
    if name in _OF_A_DOMAIN:
        return "outside the domain"
    if wide is not None or (name in _GROWING and not kind.nan):
        return "overflow"
    # Sums that overflowed in both directions on the way.
    return "inf - inf" if kind.nan and name in _SUMMING else "unknown"


def find_origin_of_nan(
    name: str, arrays: Sequence[Any], kinds: Sequence[Kind]
) -> Origin:
    """Return how an operation made a NaN of infinities."""
    if name in ("Softmax", "LogSoftmax"):
        return "row of -inf" if all(kind.is_mask for kind in kinds) else "inf - inf"
    if name == "Mul" or name.endswith("Grad"):
        return "inf * 0"
    if name == "RealDiv":
        return "inf / inf"
    if name in _PRODUCTS:
        return "inf * 0" if any((a == 0).any() for a in arrays) else "inf - inf"
    return "outside the domain" if name in ("Sin", "Cos", "Tan") else "inf - inf"


def measure_wide(
    name: str, arrays: Sequence[Any], settings: Mapping[str, Any], largest: float
) -> float | None:
    """Return the largest magnitude of a result in float64, if it is beyond the format.

    Args:
        name: TensorFlow's name of the operation.
        arrays: What it read.
        settings: Its attributes.
        largest: The largest number of the format of its result.
    """
    if name not in _WIDE:
        return None
    wide = [np.asarray(array, np.float64) for array in arrays]
    with np.errstate(all="ignore"):
        try:
            result = _WIDE[name](wide, settings)
        except (IndexError, ValueError):  # shapes that only TensorFlow combines
            return None
        magnitude = float(np.max(np.abs(result), initial=0.0))
    return magnitude if largest < magnitude < math.inf else None


def _multiply_matrices(arrays: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    first, second = arrays
    if settings.get("transpose_a") or settings.get("adj_x"):
        first = np.swapaxes(first, -1, -2)
    if settings.get("transpose_b") or settings.get("adj_y"):
        second = np.swapaxes(second, -1, -2)
    return first @ second


_WIDE: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], Any]] = {
    "Cast": lambda a, _: a[0],
    "Mul": lambda a, _: a[0] * a[1],
    "AddV2": lambda a, _: a[0] + a[1],
    "AddN": lambda a, _: sum(a),
    "Sub": lambda a, _: a[0] - a[1],
    "BiasAdd": lambda a, _: a[0] + a[1],
    "Square": lambda a, _: a[0] ** 2,
    "Exp": lambda a, _: np.exp(a[0]),
    "BiasAddGrad": lambda a, _: a[0].reshape(-1, a[0].shape[-1]).sum(0),
    "MatMul": _multiply_matrices,
    "BatchMatMulV2": _multiply_matrices,
    "BatchMatMulV3": _multiply_matrices,
}


def _ask_division(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    zero = arrays[1] == 0
    if not zero.any():
        return None
    if kind.nan and bool(((arrays[0] == 0) & zero).any()):
        return "0 / 0"
    return "division by zero"


def _ask_root(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    if kind.nan:
        return "root of a negative number"
    return "division by zero" if (arrays[0] == 0).any() else None


def _ask_root_gradient(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    if not (arrays[0] == 0).any():
        return None
    return "0 / 0" if kind.nan else "division by zero"


def _ask_power(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    if kind.nan:
        return "negative base"
    is_pole = (arrays[0] == 0) & (arrays[1] < 0)
    return "division by zero" if is_pole.any() else None


def _ask_logarithm(arrays: Sequence[Any], kind: Kind) -> Origin | None:
    del arrays
    return "log of a negative number" if kind.nan else "log of 0"


_QUESTIONS: dict[str, Callable[[Sequence[Any], Kind], Origin | None]] = {
    "RealDiv": _ask_division,
    "Div": _ask_division,
    "Rsqrt": _ask_root,
    "Sqrt": _ask_root,
    "Reciprocal": _ask_root_gradient,
    "SqrtGrad": _ask_root_gradient,
    "Pow": _ask_power,
    "Log": _ask_logarithm,
    "Log1p": _ask_logarithm,
}
"""What to ask of an operation's inputs if all of them are finite."""

_OF_A_DOMAIN = frozenset(
    {"Acos", "Asin", "Acosh", "Atanh", "Erfinv", "Ndtri", "Lgamma", "Digamma", "Tan"}
)
_PRODUCTS = frozenset(
    {
        *("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv1D", "Conv2D", "Conv3D"),
        *("Einsum", "Conv2DBackpropInput", "Conv2DBackpropFilter"),
        *("DepthwiseConv2dNative",),
    }
)
_SUMMING = frozenset({*_PRODUCTS, "Sum", "Mean", "AddN", "BiasAddGrad", "Cumsum"})
_GROWING = frozenset(
    {
        *_PRODUCTS,
        *("Mul", "AddV2", "AddN", "Sub", "RealDiv", "Exp", "Expm1", "Square", "Cast"),
        *("Sum", "Mean", "Prod", "BiasAdd", "BiasAddGrad", "Cumsum", "Pow", "Rsqrt"),
        *("UnsortedSegmentSum", "SegmentSum", "Softplus", "Elu", "Selu", "Neg"),
        *("SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "Reciprocal", "Sinh", "Cosh"),
    }
)
"""Operations whose result can be larger than what they read."""
