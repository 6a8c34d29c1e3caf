# SPDX-License-Identifier: Apache-2.0
"""The norm of many arrays in one pass, where squares may leave float32.

JAX has no float64 unless it is enabled, and the square of 1e25 is infinite in float32.
Three sums take the large, middle and small numbers, the first and the last shifted by a
power of two; then the largest group that is not empty decides.
"""

import jax
import jax.numpy as jnp

from lossscale.jax.types import DType

_EDGE = 2.0**50
"""Squares of numbers above it, or below its reciprocal, are summed separately."""

_SHIFT = 2.0**90
"""Divides the large numbers and multiplies the small ones before they are squared."""


def norm(arrays: list[jax.Array], dtype: DType) -> jax.Array:
    """Return the norm of all numbers in some real arrays; 0 if there are none.

    It is infinite or NaN if a number is.

    Args:
        arrays: Arrays of float32 or float64.
        dtype: The wider of their dtypes; that of the result.
    """
    if not arrays:
        return jnp.zeros((), dtype)
    if dtype == jnp.float64:
        upcast_arrays = [array.astype(dtype) for array in arrays]
        largest = jnp.max(
            jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in upcast_arrays])
        )
        unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
        return unit * jnp.sqrt(
            sum(jnp.sum(jnp.square(x / unit)) for x in upcast_arrays)
        )
    sums = [_sum_squares(array) for array in arrays]
    large, middle, small = (sum(group) for group in zip(*sums, strict=True))
    with_large = jnp.sqrt(large + middle / _SHIFT / _SHIFT) * _SHIFT
    with_middle = jnp.sqrt(middle + small / _SHIFT / _SHIFT)
    with_small = jnp.sqrt(small) / _SHIFT
    # NaN belongs to the middle group, and is not 0.
    lower = jnp.where(middle == 0, with_small, with_middle)
    return jnp.where(large > 0, with_large, lower)


def _sum_squares(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the sums of squares of large, middle and small numbers."""
    magnitude = jnp.abs(array)
    is_large = magnitude > _EDGE
    is_small = magnitude < 1 / _EDGE
    middle = jnp.where(is_large | is_small, 0.0, array)
    return (
        jnp.sum(jnp.square(jnp.where(is_large, array / _SHIFT, 0.0))),
        jnp.sum(jnp.square(middle)),
        jnp.sum(jnp.square(jnp.where(is_small, array * _SHIFT, 0.0))),
    )
