# SPDX-License-Identifier: Apache-2.0
"""One decision for all devices of a mapped axis.

Devices that decide for themselves come apart: one skips a step that another applies.
What they saw is combined as integer maxima, which are exact and lose no NaN whatever
the interconnect makes of one. `jit` with sharded arrays needs none of this.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lossscale.core.state import Array, Signal
from lossscale.jax import leaves

_ANY = ("nan",)
_LARGEST = ("amax", "norm")
_MEAN = ("zero_fraction", "subnormal_fraction")


def is_named(axis_name: Any) -> bool:
    """Whether there is any axis, be it of one device only."""
    return axis_name is not None and axis_name != ()


def devices(axis_name: Any) -> int:
    """Return how many devices an axis has, or several axes together; 1 without any."""
    # The sum of a constant is known when it is traced.
    return int(jax.lax.psum(1, axis_name)) if is_named(axis_name) else 1


def agreed(signal: Signal, axis_name: Any) -> Signal:
    """Return what all devices of an axis (or of several) saw together.

    `finite` holds if it does everywhere, `nan` if it does anywhere; `amax` and `norm`
    are the largest of any device, shares their mean.
    """
    if not is_named(axis_name):
        return signal
    fields = {
        name: value for name, value in signal._asdict().items() if value is not None
    }
    largest = jax.lax.pmax(
        {
            name: _integer(name, value)
            for name, value in fields.items()
            if name not in _MEAN
        },
        axis_name,
    )
    mean = {
        name: jax.lax.pmean(fields[name], axis_name) for name in _MEAN if name in fields
    }
    decoded = {
        name: _decoded(name, value, fields[name].dtype)
        for name, value in largest.items()
    }
    return signal._replace(**decoded, **mean)


def _integer(name: str, value: Array) -> Array:
    """Return a field as an integer of which the largest is what all saw."""
    if name in _LARGEST:
        return leaves.bits(value)
    return (value if name in _ANY else ~value).astype(jnp.int32)


def _decoded(name: str, value: Array, dtype: Any) -> Array:
    """Return a field that was an integer."""
    if name in _LARGEST:
        return jax.lax.bitcast_convert_type(value, dtype)
    return value > 0 if name in _ANY else value == 0
