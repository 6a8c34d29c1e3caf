# SPDX-License-Identifier: Apache-2.0
"""What `unscale` measures in addition to finiteness, when it is asked to."""

from typing import Any

import tensorflow as tf

from lossscale.core import trees
from lossscale.core.measurements import (
    AboveEdge,
    Measurement,
    find_edge,
    list_fields,
)
from lossscale.core.state import Array
from lossscale.tensorflow.gradient import values_of

_BITS = {
    # The integer of the same size, and the smallest normal number's bits.
    tf.float16: (tf.int16, 0x0400),
    tf.bfloat16: (tf.int16, 0x0080),
    tf.float32: (tf.int32, 0x0080_0000),
    tf.float64: (tf.int64, 0x0010_0000_0000_0000),
}


def measure(
    grads: Any, unscaled: Any, names: frozenset[Measurement]
) -> dict[str, Array]:
    """Measure what was asked for; sums are kept in float64."""
    scaled = [values_of(leaf) for _, leaf in trees.leaves(grads)]
    divided = [values_of(leaf) for _, leaf in trees.leaves(unscaled)]
    # float32, or float64 where a gradient is: its largest value may need it.
    number = tf.float64 if tf.float64 in [x.dtype for x in scaled] else tf.float32
    size = tf.maximum(_total([tf.size(x) for x in scaled]), 1)
    measures = {
        "nan": lambda: _total([_count(tf.math.is_nan(x)) for x in scaled]) > 0,
        "amax": lambda: tf.reduce_max(
            tf.stack([tf.zeros((), number)] + [_largest(x, number) for x in scaled])
        ),
        "norm": lambda: tf.cast(
            tf.sqrt(
                _total([tf.reduce_sum(tf.cast(x, tf.float64) ** 2) for x in divided])
            ),
            number,
        ),
        "zero_fraction": lambda: _fraction([_magnitude(x) < 1 for x in scaled], size),
        "subnormal_fraction": lambda: _fraction([_subnormal(x) for x in scaled], size),
    }
    edge = find_edge(names)
    if edge is not None:
        measures["above_edge"] = lambda: _fraction(
            [_above(x, edge) for x in scaled], size
        )
    return {name: measures[name]() for name in list_fields(names)}


def _total(numbers: list[Array]) -> Array:
    """Return the sum of scalars, in float64."""
    return tf.add_n([tf.cast(x, tf.float64) for x in (*numbers, 0.0)])


def _count(flags: Array) -> Array:
    """Return how many flags are set."""
    return tf.math.count_nonzero(flags)


def _fraction(flags: list[Array], size: Array) -> Array:
    """Return the fraction of all values whose flag is set."""
    return tf.cast(_total([_count(x) for x in flags]) / size, tf.float32)


def _largest(x: Array, number: Any) -> Array:
    """Return the largest finite magnitude in a tensor; 0 in one without any."""
    finite = tf.where(tf.math.is_finite(x), tf.abs(x), tf.zeros((), x.dtype))
    # reduce_max of no values at all is -inf.
    return tf.maximum(tf.cast(tf.reduce_max(finite), number), 0)


def _magnitude(x: Array) -> Array:
    """Return the bits of a tensor without the sign.

    Bits and not values: TensorFlow's threads take subnormal numbers for zero.
    """
    kind, _ = _BITS[x.dtype]
    return tf.bitwise.bitwise_and(tf.bitcast(x, kind), tf.constant(kind.max, kind))


def _above(x: Array, edge: AboveEdge) -> Array:
    """Return which values have a magnitude above an edge."""
    magnitudes = tf.abs(x if x.dtype == tf.float64 else tf.cast(x, tf.float32))
    return magnitudes >= edge.edge if edge.inclusive else magnitudes > edge.edge


def _subnormal(x: Array) -> Array:
    """Return which values are below the smallest normal number of their dtype."""
    _, smallest_normal = _BITS[x.dtype]
    magnitude = _magnitude(x)
    return (magnitude > 0) & (magnitude < smallest_normal)
