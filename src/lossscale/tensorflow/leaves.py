# SPDX-License-Identifier: Apache-2.0
"""One gradient of any kind that TensorFlow has: dense, sparse or ragged.

A sparse gradient (`tf.IndexedSlices`) stays sparse and a ragged one ragged: what is
done to a gradient is done to its values. Anything that is not floating-point is a
`GradientError` that names the place.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from lossscale.core.errors import GradientError
from lossscale.core.state import Array

Leaf: TypeAlias = Any
"""A `tf.Tensor`, `tf.Variable`, `tf.IndexedSlices` or `tf.RaggedTensor`."""

_NARROW = (tf.float16, tf.bfloat16)
_FLOATS = (*_NARROW, tf.float32, tf.float64)


def values(leaf: Leaf) -> Array:
    """Return the numbers of a gradient as one dense tensor."""
    if isinstance(leaf, tf.IndexedSlices):
        return leaf.values
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.flat_values
    return leaf


def with_values(leaf: Leaf, new: Array) -> Leaf:
    """Return a gradient of the same kind and places with other numbers."""
    if isinstance(leaf, tf.IndexedSlices):
        return tf.IndexedSlices(new, leaf.indices, leaf.dense_shape)
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.with_flat_values(new)
    return new


def checked(what: str, path: str, leaf: Any) -> Leaf:
    """Return a leaf with floating-point tensors in it, or raise."""
    kind: Any
    if isinstance(leaf, (tf.IndexedSlices, tf.RaggedTensor)):
        kind = values(leaf).dtype
    elif isinstance(leaf, tf.SparseTensor):
        kind = "a tf.SparseTensor"
    else:
        try:
            leaf = tf.convert_to_tensor(leaf)
            kind = leaf.dtype
        except (TypeError, ValueError):
            kind = type(leaf).__name__
    if kind not in _FLOATS:
        name = getattr(kind, "name", kind)
        message = (
            f"The {what}{' at ' + path if path else ''} is {name}, expected a float16, "
            "bfloat16, float32 or float64 tensor, tf.IndexedSlices or tf.RaggedTensor. "
            "Leave out what is not differentiated, or put None in its place."
        )
        raise GradientError(message)
    return leaf


def widened(leaf: Leaf) -> Leaf:
    """Return a gradient in float32 if it is narrower, else as it is."""
    return cast(leaf, tf.float32) if values(leaf).dtype in _NARROW else leaf


def cast(leaf: Leaf, dtype: Any) -> Leaf:
    """Return a gradient in another dtype; in its own it stays the same object."""
    if values(leaf).dtype == dtype:
        return leaf
    return with_values(leaf, tf.cast(values(leaf), dtype))


def multiplied(leaf: Leaf, factor: Array) -> Leaf:
    """Return a gradient times a float32 factor, in the gradient's dtype."""
    numbers = values(leaf)
    return with_values(leaf, numbers * tf.cast(factor, numbers.dtype))


def is_finite(leaf: Leaf, replicas: int = 1) -> Array:
    """Return whether a gradient is finite, and stays so when it is added up.

    Two sums are still to come after a check. Optimizers add up the rows of a sparse
    gradient that have the same index; under a strategy they add up the gradients of
    all replicas. Finite numbers can overflow there, and nobody would look again.
    """
    numbers = values(leaf)
    largest = numbers.dtype.max / replicas
    if not isinstance(leaf, tf.IndexedSlices):
        if replicas == 1:
            return tf.reduce_all(tf.math.is_finite(numbers))
        # NaN and infinity fail the comparison too.
        return tf.reduce_all(tf.abs(numbers) <= largest)
    wide = tf.abs(values(widened(leaf)))
    # However the indices repeat, no sum exceeds that of all rows.
    surely = tf.reduce_all(tf.reduce_sum(wide, axis=0) <= float(largest))
    return _either(surely, lambda: _sums_are_within(leaf, float(largest)))


def _either(first: Array, second: Callable[[], Array]) -> Array:
    """Return `first or second()`; the second is costly and seldom needed."""
    if tf.executing_eagerly():
        return first if bool(first) else second()
    return tf.cond(first, lambda: tf.constant(True), second)


def _sums_are_within(leaf: Any, largest: float) -> Array:
    """Return whether the sums over rows with the same index are within bounds.

    Sorted by index, equal indices stand together and can be numbered without
    `tf.unique`, whose result has a size that XLA cannot know.
    """
    order = tf.argsort(leaf.indices)
    indices = tf.gather(leaf.indices, order)
    rows = tf.gather(values(widened(leaf)), order)
    is_new = tf.cast(tf.not_equal(indices[1:], indices[:-1]), tf.int32)
    segments = tf.concat([[0], tf.cumsum(is_new)], axis=0)
    sums = tf.math.unsorted_segment_sum(rows, segments, tf.shape(rows)[0])
    return tf.reduce_all(tf.abs(sums) <= largest)
