# SPDX-License-Identifier: Apache-2.0
"""Gradients: unscaled, and checked.

Unscaling divides, as Keras does: a product with the reciprocal would differ in the last
bit unless the scale is a power of two. It divides in float32 or wider, whatever the
gradient's dtype, and leaves a sparse gradient sparse.
"""

from collections.abc import Sequence
from typing import Any

from keras import ops

from lossscale.core.headroom import LARGEST, NARROW
from lossscale.core.state import Array
from lossscale.core.validation import FLOAT32_MAX
from lossscale.errors import GradientError, StructureError
from lossscale.keras.headroom import Headroom
from lossscale.keras.operations import (
    divided,
    dtype_of,
    largest_magnitude,
    map_values,
    stack,
    values_of,
    where,
)


def check(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raise unless there is a floating-point gradient, or None, for each variable."""
    if len(gradients) != len(variables):
        message = (
            f"There are {len(gradients)} gradients for {len(variables)} variables. "
            "Give one for each, and None where there is none."
        )
        raise StructureError(message)
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None or overwrites(variable):
            continue
        if not hasattr(gradient, "dtype") or dtype_of(gradient) not in LARGEST:
            typed = hasattr(gradient, "dtype")
            kind = dtype_of(gradient) if typed else type(gradient).__name__
            whose = "" if variable is None else f" of {name_of(variable)}"
            message = (
                f"The gradient{whose} is {kind}, expected "
                f"{', '.join(LARGEST)}. Leave out what is not differentiated, or put "
                "None in its place."
            )
            raise GradientError(message)
        wanted = None if variable is None else tuple(variable.shape)
        if wanted is not None and not _fits(gradient, wanted):
            message = (
                f"The gradient of {name_of(variable)} has the shape "
                f"{tuple(gradient.shape)}, and its variable {wanted}."
            )
            raise StructureError(message)


def _fits(gradient: Any, wanted: tuple[int, ...]) -> bool:
    """Whether a gradient has its variable's shape, as far as that is known."""
    if hasattr(gradient, "dense_shape"):  # the rows of a sparse one are its own affair
        shape, wanted = tuple(gradient.values.shape)[1:], wanted[1:]
    else:
        if getattr(gradient.shape, "rank", 0) is None:
            return True  # TensorFlow, while tracing
        shape = tuple(gradient.shape)
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(
        have in (None, want) for have, want in pairs
    )


def overwrites(variable: Any) -> bool:
    """Whether a variable is replaced by its gradient, as the scales of float8 are."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def name_of(variable: Any) -> str:
    """Return what a message calls a variable; a tf.Variable has no path."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def unscaled(
    gradients: Sequence[Any], variables: Sequence[Any], scale: Array
) -> list[Any]:
    """Return the gradients divided by the scale.

    None stays, and so does the gradient of a variable that is overwritten by it: it is
    a value, not a derivative of the scaled loss.
    """

    def divide(values: Array) -> Array:
        if dtype_of(values) in NARROW:
            # torch would divide in float16, where what was scaled up vanishes again.
            values = ops.cast(values, "float32")
        return divided(values, scale)

    return [
        gradient
        if gradient is None or overwrites(variable)
        else map_values(divide, gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def fitted(
    gradients: Sequence[Any], variables: Sequence[Any], headroom: Headroom
) -> list[Any]:
    """Return gradients in the dtypes that the inner optimizer takes.

    Its own cast to a float16 variable comes too late for its accumulators.
    """

    def fit(gradient: Any, variable: Any) -> Any:
        if gradient is None or headroom.takes_wide or overwrites(variable):
            return gradient
        dtype = dtype_of(variable)
        if dtype not in NARROW or dtype_of(gradient) == dtype:
            return gradient
        return map_values(lambda values: ops.cast(values, dtype), gradient)

    return [fit(*pair) for pair in zip(gradients, variables, strict=True)]


REASONS = ("", "inf", "nan", "headroom")
"""Why a gradient is not applied, by number; the first is that it is."""


def reasons(
    gradients: Sequence[Any], variables: Sequence[Any], headroom: Headroom | None
) -> Array:
    """Return for each unscaled gradient why it cannot be applied; 0 if it can.

    One number of each gradient is compared, its largest. A value that overwrites its
    variable is checked too: an infinite one would stay in the history that later scales
    of float8 are taken from.
    """
    tops, limits = [], []
    for gradient, variable in zip(gradients, variables, strict=True):
        dtype = "float32" if gradient is None else dtype_of(gradient)
        top, limit = ops.zeros((), "float32"), LARGEST.get(dtype, FLOAT32_MAX)
        if gradient is not None:
            values = values_of(gradient)
            top = largest_magnitude(values)
            if headroom is not None and not overwrites(variable):
                limit = headroom.largest(dtype_of(variable), dtype)
            if values is not gradient and headroom is not None:
                # Rows that occur more than once are summed later; how often is not
                # known, so each may be all of them. Keras makes a dense array here, in
                # which a finite duplicate hides an infinite one.
                limit = limit / ops.cast(ops.shape(values)[0], dtype_of(top))
        tops.append(top)
        limits.append(limit)
    if not tops:
        return ops.zeros((0,), "int32")
    top = stack(tops)
    large = ops.logical_not(top <= stack(limits, like=top))
    finite = ops.cast(large, "int32") * 3
    number = where(ops.isfinite(top), finite, 1)
    return where(ops.isnan(top), 2, number)


def is_overflow(reasons: Array) -> Array:
    """Whether a gradient was infinite or NaN, and not only too large."""
    return ops.any(ops.logical_or(ops.equal(reasons, 1), ops.equal(reasons, 2)))


def poisoned(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients in which every infinity has become NaN.

    Clipping to a range makes a number of an infinity, which would then be applied; NaN
    stays NaN through it.
    """

    def poison(values: Array) -> Array:
        nan = ops.convert_to_tensor(float("nan"), dtype_of(values))
        return ops.where(ops.isfinite(values), values, nan)

    return [
        gradient if gradient is None else map_values(poison, gradient)
        for gradient in gradients
    ]
