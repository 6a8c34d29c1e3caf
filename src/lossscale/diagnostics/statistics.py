# SPDX-License-Identifier: Apache-2.0
"""Measure stored gradients tensor by tensor, in NumPy.

The reference that kernels are compared with, and what NumPy training loops record.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lossscale.core.statistics import TensorStatistics
from lossscale.diagnostics.formats import FORMATS, NumberFormat
from lossscale.errors import GradientError

Array = npt.NDArray[Any]


class ExponentHistogram(NamedTuple):
    """How many finite, non-zero numbers of an array have which exponent.

    Example:
        >>> from lossscale.diagnostics import exponent_histogram
        >>> histogram = exponent_histogram([0.5, 0.75, 2.0])
        >>> histogram.first_exponent, histogram.counts.tolist()
        (-1, [2, 0, 1])
    """

    first_exponent: int
    """The exponent that the first count is for; 0 if there is no count."""
    counts: npt.NDArray[np.int64]
    """One count per exponent, from the smallest to the largest that occurs."""


def exponent_histogram(array: npt.ArrayLike) -> ExponentHistogram:
    """Count the numbers of an array by the exponent of their magnitude.

    The exponent of `x` is `floor(log2(abs(x)))`, for subnormal numbers as well. Zeros,
    infinities and NaN have none.

    Raises:
        GradientError: If the array is not floating-point.

    Example:
        >>> from lossscale.diagnostics import exponent_histogram
        >>> first, counts = exponent_histogram([0.5, 0.75, 2.0, 0.0, float("inf")])
        >>> first, counts.tolist()
        (-1, [2, 0, 1])
    """
    values = _floating(array).ravel()
    values = values[np.isfinite(values) & (values != 0)]
    if not values.size:
        return ExponentHistogram(0, np.zeros(0, np.int64))
    # frexp's mantissa is in [0.5, 1): its exponent is one above that of the number.
    exponents = np.frexp(values)[1].astype(np.int64) - 1
    first = int(exponents.min())
    return ExponentHistogram(first, np.bincount(exponents - first).astype(np.int64))


def measure_tensors(tensors: Mapping[str, npt.ArrayLike]) -> TensorStatistics:
    """Measure the stored gradients of a step, for `Recorder.record_statistics`.

    Args:
        tensors: The gradients as stored (scaled, in their own format), by name, in the
            model's order.

    Raises:
        GradientError: If one of them is not floating-point.

    Example:
        >>> import numpy as np
        >>> from lossscale.diagnostics import measure_tensors
        >>> gradients = {"w": np.array([0.0, 1e-7, 0.25, 0.5], np.float16)}
        >>> found = measure_tensors(gradients)
        >>> found.amax, found.zeros, found.subnormals
        ([0.5], [0.25], [0.25])
    """
    bounds = [_smallest_normal(np.asarray(value)) for value in tensors.values()]
    arrays = {name: _floating(value) for name, value in tensors.items()}
    histograms = [exponent_histogram(array) for array in arrays.values()]
    first, counts = _align(histograms)
    return TensorStatistics(
        names=list(arrays),
        sizes=[array.size for array in arrays.values()],
        amax=[_largest(array) for array in arrays.values()],
        zeros=[_fraction(array == 0) for array in arrays.values()],
        subnormals=[
            _fraction((array != 0) & (np.abs(array) < bound))
            for array, bound in zip(arrays.values(), bounds, strict=True)
        ],
        first_exponent=first,
        counts=counts,
    )


def _floating(array: npt.ArrayLike) -> Array:
    """Return an array of NumPy's own floating-point numbers.

    bfloat16 and float8, which NumPy knows through ml_dtypes, become float32: each of
    their numbers is one of float32's as well.
    """
    values = np.asarray(array)
    if _format_of(values) is not None:
        values = values.astype(np.float32)
    if values.dtype.kind != "f":
        message = (
            f"Statistics need floating-point numbers, got an array of {values.dtype}."
        )
        raise GradientError(message)
    return values


def _largest(array: Array) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0))


def _fraction(flags: Array) -> float:
    return float(np.count_nonzero(flags) / max(1, flags.size))


def _format_of(array: Array) -> NumberFormat | None:
    """Return the format of an array whose numbers are not NumPy's own."""
    name = array.dtype.name
    names = ("bfloat16", "float8_e5m2", "float8_e4m3")
    matches = [candidate for candidate in names if name.startswith(candidate)]
    return FORMATS[matches[0]] if matches else None


def _smallest_normal(array: Array) -> float:
    number_format = _format_of(array)
    if number_format is not None:
        return math.ldexp(1.0, number_format.smallest_normal)
    is_float = array.dtype.kind == "f"
    return float(np.finfo(array.dtype).smallest_normal) if is_float else 0.0


def _align(histograms: list[ExponentHistogram]) -> tuple[int, list[list[int]]]:
    """Return histograms over one range of exponents."""
    filled = [(first, counts) for first, counts in histograms if counts.size]
    first = min((start for start, _ in filled), default=0)
    end = max((start + counts.size for start, counts in filled), default=0)
    rows = []
    for start, counts in histograms:
        row = np.zeros(end - first, np.int64)
        if counts.size:
            row[start - first : start - first + counts.size] = counts
        rows.append(row.tolist())
    return first, rows
