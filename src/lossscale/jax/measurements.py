# SPDX-License-Identifier: Apache-2.0
"""The optional measurements of `unscale(measure=...)`.

Each measurement is a plain reduction over the gradients, which XLA fuses into the pass
that checks them. Zeros and subnormal numbers are distinguished by their bits, because
processors that flush subnormal numbers compare them equal to zero.
"""

import jax
import jax.numpy as jnp

from lossscale.core.measurements import (
    AboveEdge,
    Measurement,
    find_edge,
    list_fields,
)
from lossscale.jax import gradient
from lossscale.jax.norms import norm
from lossscale.jax.types import DType


def measure(
    grads: list[jax.Array], unscaled: list[jax.Array], names: frozenset[Measurement]
) -> dict[str, jax.Array]:
    """Compute the named measurements.

    Args:
        grads: The scaled gradients, in their own dtypes.
        unscaled: The same gradients, unscaled and upcast.
        names: The measurements to compute.
    """
    scaled = [part for leaf in grads for part in gradient.split_complex(leaf)]
    # float32, or float64 where a gradient is: its largest value may need it.
    has_float64 = any(part.dtype == jnp.float64 for part in scaled)
    dtype = jnp.float64 if has_float64 else jnp.float32
    count = max(1, sum(part.size for part in scaled))
    measures = {
        "nan": lambda: _any([jnp.any(jnp.isnan(part)) for part in scaled]),
        "amax": lambda: _max([_amax(part).astype(dtype) for part in scaled], dtype),
        "norm": lambda: norm(
            [part for leaf in unscaled for part in gradient.split_complex(leaf)], dtype
        ),
        "zero_fraction": lambda: _fraction(
            [gradient.get_magnitude_bits(part) == 0 for part in scaled], count
        ),
        "subnormal_fraction": lambda: _fraction(
            [_is_subnormal(part) for part in scaled], count
        ),
    }
    edge = find_edge(names)
    if edge is not None:
        measures["above_edge"] = lambda: _fraction(
            [_is_above(part, edge) for part in scaled], count
        )
    return {name: measures[name]() for name in list_fields(names)}


def _amax(part: jax.Array) -> jax.Array:
    """Return the largest finite magnitude of an array, upcast."""
    values = gradient.upcast(part)
    finite = jnp.where(jnp.isfinite(values), jnp.abs(values), 0)
    return jnp.max(finite, initial=0)


def _is_above(part: jax.Array, edge: AboveEdge) -> jax.Array:
    """Return which numbers have a magnitude above an edge."""
    magnitudes = jnp.abs(gradient.upcast(part))
    return magnitudes >= edge.edge if edge.inclusive else magnitudes > edge.edge


def _is_subnormal(part: jax.Array) -> jax.Array:
    """Return which numbers are below the smallest normal number of their dtype."""
    bits = gradient.get_magnitude_bits(part)
    smallest_normal = 1 << jnp.finfo(part.dtype).nmant
    return (bits > 0) & (bits < smallest_normal)


def _fraction(flags: list[jax.Array], count: int) -> jax.Array:
    """Return the fraction of all values whose flag is set."""
    # Each sum in int32; their total may exceed it, and is rounded to float32 anyway.
    totals = [jnp.sum(flag, dtype=jnp.int32).astype(jnp.float32) for flag in flags]
    total = jnp.sum(_stack(totals, jnp.float32))
    # XLA multiplies by the reciprocal of a constant, which rounds another way.
    return total / jnp.where(total >= 0, jnp.float32(count), 1)


def _any(flags: list[jax.Array]) -> jax.Array:
    """Return whether any flag is set."""
    return jnp.any(_stack(flags, jnp.bool_))


def _max(values: list[jax.Array], dtype: DType) -> jax.Array:
    """Return the largest of some numbers; 0 if there are none."""
    return jnp.max(_stack(values, dtype), initial=0)


def _stack(values: list[jax.Array], dtype: DType) -> jax.Array:
    """Return scalars in one array, which may be empty."""
    return jnp.stack(values) if values else jnp.zeros((0,), dtype)
