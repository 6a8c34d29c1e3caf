# SPDX-License-Identifier: Apache-2.0
"""What `unscale` measures beside finiteness, when it is asked to.

Every number comes from plain reductions over the same arrays, which XLA fuses into the
pass that looks for infinities. Zeros and subnormal numbers are told by their bits,
because processors that flush take one for the other.
"""

from typing import Any

import jax.numpy as jnp

from lossscale.core.state import Array
from lossscale.jax import leaves
from lossscale.jax.norms import norm


def measured(
    grads: list[Array], unscaled: list[Array], names: frozenset[str]
) -> dict[str, Array]:
    """Measure what was asked for.

    Args:
        grads: The scaled gradients, as they came.
        unscaled: The same, unscaled and widened.
        names: What to measure.
    """
    scaled = [part for leaf in grads for part in leaves.parts(leaf)]
    # float32, or float64 where a gradient is: its largest value may need it.
    has_float64 = any(part.dtype == jnp.float64 for part in scaled)
    number = jnp.float64 if has_float64 else jnp.float32
    count = max(1, sum(part.size for part in scaled))
    measures = {
        "nan": lambda: _any([jnp.any(jnp.isnan(part)) for part in scaled]),
        "amax": lambda: _largest(
            [_amax(part).astype(number) for part in scaled], number
        ),
        "norm": lambda: norm(
            [part for leaf in unscaled for part in leaves.parts(leaf)], number
        ),
        "zero_fraction": lambda: _share(
            [leaves.bits(part) == 0 for part in scaled], count
        ),
        "subnormal_fraction": lambda: _share([_is_subnormal(x) for x in scaled], count),
    }
    return {name: measures[name]() for name in sorted(names)}


def _amax(part: Array) -> Array:
    """Return the largest finite magnitude of an array, widened."""
    wide = leaves.widened(part)
    finite = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    return jnp.max(finite, initial=0)


def _is_subnormal(part: Array) -> Array:
    """Return which numbers are below the smallest normal one of their own dtype."""
    found = leaves.bits(part)
    smallest_normal = 1 << jnp.finfo(part.dtype).nmant
    return (found > 0) & (found < smallest_normal)


def _share(flags: list[Array], count: int) -> Array:
    """Return which share of all values has its flag set."""
    # Each sum in int32; their total may be beyond it, and is rounded to float32 anyway.
    totals = [jnp.sum(flag, dtype=jnp.int32).astype(jnp.float32) for flag in flags]
    return jnp.sum(_row(totals, jnp.float32)) / count


def _any(flags: list[Array]) -> Array:
    """Return whether any flag is set."""
    return jnp.any(_row(flags, jnp.bool_))


def _largest(values: list[Array], dtype: Any) -> Array:
    """Return the largest of some numbers; 0 without any."""
    return jnp.max(_row(values, dtype), initial=0)


def _row(values: list[Array], dtype: Any) -> Array:
    """Return scalars in one array, which may be empty."""
    return jnp.stack(values) if values else jnp.zeros((0,), dtype)
