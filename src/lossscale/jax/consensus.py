# SPDX-License-Identifier: Apache-2.0
"""One decision for all devices of a mapped axis.

Devices that decide separately diverge: one skips a step that another applies. Their
signals are reduced as integer maxima, which are exact and keep NaN on every
interconnect. `jit` with sharded arrays needs none of this.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.state import Signal
from lossscale.jax import gradient
from lossscale.jax.types import AxisName

_ANY = ("nan", "overflow")
_LARGEST = ("amax", "norm")
_MEAN = ("zero_fraction", "subnormal_fraction", "above_edge")


def has_axis(axis_name: AxisName) -> bool:
    """Whether any axis is named, even if it has one device only."""
    return axis_name is not None and axis_name != ()


def count_devices(axis_name: AxisName) -> int:
    """Return how many devices an axis, or several axes together, have; 1 without."""
    # The sum of a constant is known at trace time.
    return int(jax.lax.psum(1, axis_name)) if has_axis(axis_name) else 1


def reduce_signal(signal: Signal, axis_name: AxisName) -> Signal:
    """Return the signal of all devices of an axis, or of several axes, together.

    `finite` is the AND over devices and `nan` the OR; `amax` and `norm` are the largest
    of any device, shares the mean. `too_large` is the OR, unless a gradient is not
    finite on some device.
    """
    if not has_axis(axis_name):
        return signal
    fields = {
        name: value for name, value in signal._asdict().items() if value is not None
    }
    too_large = fields.pop("too_large", None)
    if too_large is not None:
        fields["overflow"] = ~(signal.finite | too_large)
    largest = jax.lax.pmax(
        {
            name: _encode(name, value)
            for name, value in fields.items()
            if name not in _MEAN
        },
        axis_name,
    )
    mean = {
        name: jax.lax.pmean(fields[name], axis_name) for name in _MEAN if name in fields
    }
    decoded = {
        name: _decode(name, value, fields[name].dtype)
        for name, value in largest.items()
    }
    overflow = decoded.pop("overflow", None)
    if overflow is not None:
        decoded["too_large"] = ~(decoded["finite"] | overflow)
    return signal._replace(**decoded, **mean)


def _encode(name: str, value: jax.Array) -> jax.Array:
    """Return a field as an integer whose maximum over devices is the result."""
    if name in _LARGEST:
        return gradient.get_magnitude_bits(value)
    return (value if name in _ANY else ~value).astype(jnp.int32)


def _decode(name: str, value: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return a field from its reduced integer."""
    if name in _LARGEST:
        return jax.lax.bitcast_convert_type(value, dtype)
    return value > 0 if name in _ANY else value == 0
