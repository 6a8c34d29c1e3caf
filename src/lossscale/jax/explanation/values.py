# SPDX-License-Identifier: Apache-2.0
"""Values of an evaluation: what each has that is not finite, and what made it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.explanation.evaluated import Node
from lossscale.core.explanation.kinds import Kind


def kind_of(array: Any) -> Kind | None:
    """Return what an array has that is not finite; `None` if it is finite.

    Waits for the device.
    """
    dtype = jnp.result_type(array) if not hasattr(array, "dtype") else array.dtype
    if not jnp.issubdtype(dtype, jnp.inexact) or not jnp.size(array):
        return None
    if jnp.size(array) <= _SMALL:
        found = _find_flags_of_few(np.asarray(array))
    else:
        found = jax.device_get(_find_flags(array))
    flags = Kind(*(bool(flag) for flag in found))
    return flags if any(flags) else None


_SMALL = 2**16
"""Up to so many numbers are read on the host: that takes less than to compile."""


def _find_flags_of_few(array: Any) -> tuple[bool, bool, bool]:
    nan, infinite = np.isnan(array).any(), np.isinf(array).any()
    if not infinite or np.iscomplexobj(array):
        return nan, infinite, False
    low, high = np.nanmin(array), np.nanmax(array)
    return nan, bool(np.isinf(high) and high > 0), bool(np.isinf(low) and low < 0)


@jax.jit
def _find_flags(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        infinite = jnp.isinf(array).any()
        return jnp.isnan(array).any(), infinite, jnp.zeros((), bool)
    return (
        jnp.isnan(array).any(),
        jnp.isposinf(array).any(),
        jnp.isneginf(array).any(),
    )


class Value(NamedTuple):
    """An array, what made it, and what it has that is not finite."""

    array: Any
    node: Node | None = None
    """`None` for a literal."""
    kind: Kind | None = None
