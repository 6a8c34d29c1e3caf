# SPDX-License-Identifier: Apache-2.0
"""Validate, unscale and check gradients.

Unscaling divides, as Keras does: a product with the reciprocal would differ in the last
bit unless the scale is a power of two. It divides in float32 or wider, whatever the
gradient's dtype, and leaves a sparse gradient sparse.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from keras import ops

from lossscale.core.headroom import LARGEST, NARROW
from lossscale.core.state import Array
from lossscale.core.validation import FLOAT32_MAX
from lossscale.errors import GradientError, StructureError
from lossscale.keras.backend import (
    divide,
    dtype_name,
    largest_magnitude,
    map_values,
    stack,
    values_of,
    where,
)
from lossscale.keras.headroom import Headroom


def validate(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raise unless there is a floating-point gradient, or None, for each variable."""
    if len(gradients) != len(variables):
        message = (
            f"There are {len(gradients)} gradients for {len(variables)} variables. "
            "Give one for each, and None where there is none."
        )
        raise StructureError(message)
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None or is_overwritten(variable):
            continue
        if not hasattr(gradient, "dtype") or dtype_name(gradient) not in LARGEST:
            typed = hasattr(gradient, "dtype")
            kind = dtype_name(gradient) if typed else type(gradient).__name__
            whose = "" if variable is None else f" of {name_of(variable)}"
            message = (
                f"The gradient{whose} is {kind}, expected "
                f"{', '.join(LARGEST)}. Leave out what is not differentiated, or put "
                "None in its place."
            )
            raise GradientError(message)
        expected = None if variable is None else tuple(variable.shape)
        if expected is not None and not _has_shape(gradient, expected):
            message = (
                f"The gradient of {name_of(variable)} has the shape "
                f"{tuple(gradient.shape)}, expected {expected}, the shape of its "
                "variable."
            )
            raise StructureError(message)


def _has_shape(gradient: Any, expected: tuple[int, ...]) -> bool:
    """Whether a gradient has its variable's shape, as far as that is known."""
    if hasattr(gradient, "dense_shape"):  # of a sparse one, its number of rows is free
        shape, expected = tuple(gradient.values.shape)[1:], expected[1:]
    else:
        if getattr(gradient.shape, "rank", 0) is None:
            return True  # TensorFlow, while tracing
        shape = tuple(gradient.shape)
    pairs = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(
        actual in (None, size) for actual, size in pairs
    )


def is_overwritten(variable: Any) -> bool:
    """Whether a variable is replaced by its gradient, as the scales of float8 are."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def name_of(variable: Any) -> str:
    """Return the name of a variable for messages; a tf.Variable has no path."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def unscale(
    gradients: Sequence[Any], variables: Sequence[Any], scale: Array
) -> list[Any]:
    """Return the gradients divided by the scale.

    None stays, and so does the gradient of a variable that is overwritten by it: it is
    a value, not a derivative of the scaled loss.
    """

    def unscale_values(values: Array) -> Array:
        if dtype_name(values) in NARROW:
            # torch would divide in float16, where small results become 0 again.
            values = ops.cast(values, "float32")
        return divide(values, scale)

    return [
        gradient
        if gradient is None or is_overwritten(variable)
        else map_values(unscale_values, gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def cast_for_optimizer(
    gradients: Sequence[Any], variables: Sequence[Any], headroom: Headroom
) -> list[Any]:
    """Return gradients in the dtypes that the inner optimizer takes.

    Its own cast to a float16 variable comes too late for its accumulators.
    """

    def cast(gradient: Any, variable: Any) -> Any:
        if gradient is None or headroom.accepts_wide or is_overwritten(variable):
            return gradient
        dtype = dtype_name(variable)
        if dtype not in NARROW or dtype_name(gradient) == dtype:
            return gradient
        return map_values(lambda values: ops.cast(values, dtype), gradient)

    return [cast(*pair) for pair in zip(gradients, variables, strict=True)]


REASONS = ("", "inf", "nan", "headroom")
"""Why a gradient is not applied, by number; 0 if it is."""


class Findings(NamedTuple):
    """What one read of the unscaled gradients found."""

    reasons: Array
    """For each gradient why it cannot be applied, a number; 0 if it can."""
    amax: Array | None
    """The largest magnitude, in float32, if it was asked for; 0 of a gradient that is
    not finite."""


def find_reasons(
    gradients: Sequence[Any], variables: Sequence[Any], headroom: Headroom | None
) -> Array:
    """Return for each unscaled gradient why it cannot be applied; 0 if it can."""
    return inspect(gradients, variables, headroom).reasons


def inspect(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    headroom: Headroom | None,
    *,
    measure_amax: bool = False,
) -> Findings:
    """Return what one read of unscaled gradients finds.

    One number of each gradient is compared, its largest. A value that overwrites its
    variable is checked too: an infinite one would stay in the history that later scales
    of float8 are taken from.
    """
    magnitudes, limits, scaled = [], [], []
    for gradient, variable in zip(gradients, variables, strict=True):
        dtype = "float32" if gradient is None else dtype_name(gradient)
        magnitude = ops.zeros((), "float32")
        limit = LARGEST.get(dtype, FLOAT32_MAX)
        if gradient is not None:
            values = values_of(gradient)
            magnitude = largest_magnitude(values)
            if headroom is not None and not is_overwritten(variable):
                limit = headroom.largest(dtype_name(variable), dtype)
            if values is not gradient and headroom is not None:
                # Rows that occur more than once are summed later; how often is not
                # known, so each may be all of them. Keras makes a dense array here, in
                # which a finite duplicate hides an infinite one.
                limit = limit / ops.cast(ops.shape(values)[0], dtype_name(magnitude))
        scaled.append(gradient is not None and not is_overwritten(variable))
        magnitudes.append(magnitude)
        limits.append(limit)
    if not magnitudes:
        zero = ops.zeros((), "float32") if measure_amax else None
        return Findings(ops.zeros((0,), "int32"), zero)
    largest = stack(magnitudes)
    is_too_large = ops.logical_not(largest <= stack(limits, like=largest))
    finite_reason = ops.cast(is_too_large, "int32") * 3
    reason = where(ops.isfinite(largest), finite_reason, 1)
    reasons = where(ops.isnan(largest), 2, reason)
    if not measure_amax:
        return Findings(reasons, None)
    counted = ops.convert_to_tensor(scaled, "bool")
    counted = ops.logical_and(counted, largest <= FLOAT32_MAX)  # nor is NaN
    amax = ops.max(ops.where(counted, largest, ops.zeros_like(largest)))
    return Findings(reasons, ops.cast(amax, "float32"))


def is_overflow(reasons: Array) -> Array:
    """Whether a gradient was infinite or NaN, and not only too large."""
    return ops.any(ops.logical_or(ops.equal(reasons, 1), ops.equal(reasons, 2)))


def replace_infinities(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients in which every infinity has become NaN.

    Clipping to a range turns an infinity into a number, which would then be applied;
    NaN stays NaN.
    """

    def replace(values: Array) -> Array:
        nan = ops.convert_to_tensor(float("nan"), dtype_name(values))
        return ops.where(ops.isfinite(values), values, nan)

    return [
        gradient if gradient is None else map_values(replace, gradient)
        for gradient in gradients
    ]
