# SPDX-License-Identifier: Apache-2.0
"""One gradient of any kind that TensorFlow has: dense, sparse or ragged.

A sparse gradient (`tf.IndexedSlices`) stays sparse and a ragged one ragged: what is
done to a gradient is done to its values. Anything that is not floating-point is a
`GradientError` that names the place.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from lossscale.core.headroom import largest_sum
from lossscale.core.state import Array
from lossscale.errors import GradientError

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


def dtype_name(leaf: Leaf) -> str:
    """Return the name of a gradient's dtype."""
    return str(values(leaf).dtype.name)


def magnitude(leaf: Leaf) -> Array:
    """Return the largest magnitude in a gradient, in float32 or wider; NaN if one is.

    0 for a gradient without numbers.
    """
    numbers = values(widened(leaf))
    # As integers, whose order is that of the magnitudes, with NaN at the end: compiled
    # by XLA for a CPU, reduce_max of floats passes over NaN.
    kind = tf.int64 if numbers.dtype == tf.float64 else tf.int32
    bits = tf.reduce_max(tf.bitcast(tf.abs(numbers), kind))
    return tf.bitcast(tf.maximum(bits, tf.zeros((), kind)), numbers.dtype)


def has_finite_values(leaf: Leaf) -> Array:
    """Return whether every number of a gradient is finite."""
    return tf.reduce_all(tf.math.is_finite(values(leaf)))


def is_finite(leaf: Leaf) -> Array:
    """Return whether a gradient is finite; a sparse one, when its rows are added up."""
    if not isinstance(leaf, tf.IndexedSlices):
        return has_finite_values(leaf)
    return is_within(leaf, math.inf, dtype_name(leaf))


def is_within(leaf: Leaf, largest: float, dtype: str, addends: int = 1) -> Array:
    """Return whether every number of a gradient is at most so large.

    Sums are still to come after the check: optimizers add up the rows of a sparse
    gradient that have the same index, and the gradients of all replicas.

    Args:
        leaf: A gradient.
        largest: The bound on each number, or on each sum of rows with the same index.
        dtype: In which rows are added up.
        addends: Over how many replicas and micro-batches they are added up after that.
    """
    if isinstance(leaf, tf.IndexedSlices):
        return _is_sparse_within(leaf, largest, dtype, addends)
    # In float32, where the bound is not rounded; NaN and infinity fail as well.
    return tf.reduce_all(tf.abs(values(widened(leaf))) <= largest)


def _is_sparse_within(leaf: Any, largest: float, dtype: str, addends: int) -> Array:
    """Return whether the rows of a sparse gradient stay within when added up.

    Magnitudes are added: the order in which optimizers add rows is not known, and what
    cancels in the end may have overflowed on the way.
    """
    magnitudes = tf.abs(values(widened(leaf)))
    count = tf.shape(magnitudes)[0]

    def are_within(sums: Array, rows: Array) -> Array:
        exact = largest_sum(dtype, tf.cast(rows * addends, sums.dtype)) / addends
        return tf.reduce_all(sums <= tf.minimum(exact, _finite(largest, sums)))

    # However the indices repeat, no sum exceeds that of all rows.
    surely = are_within(tf.reduce_sum(magnitudes, axis=0), tf.maximum(count, 1))
    return _either(surely, lambda: are_within(*_sums(leaf.indices, magnitudes, count)))


def _finite(largest: float, like: Array) -> Array:
    """Return a bound in the dtype of what it bounds; there is none beyond its range."""
    return tf.constant(min(largest, float(like.dtype.max)), like.dtype)


def _either(first: Array, second: Callable[[], Array]) -> Array:
    """Return `first or second()`; the second is costly and seldom needed."""
    if tf.executing_eagerly():
        return first if bool(first) else second()
    return tf.cond(first, lambda: tf.constant(True), second, name="either")


def _sums(indices: Array, rows: Array, count: Array) -> tuple[Array, Array]:
    """Return the sums over rows with the same index, and how many rows each has.

    Sorted by index, equal indices stand together and can be numbered without
    `tf.unique`, whose result has a size that XLA cannot know.
    """
    order = tf.argsort(indices)
    indices = tf.gather(indices, order)
    is_new = tf.cast(tf.not_equal(indices[1:], indices[:-1]), tf.int32)
    segments = tf.concat([[0], tf.cumsum(is_new)], axis=0)
    add = tf.math.unsorted_segment_sum
    sums = add(tf.gather(rows, order), segments, count)
    rows_each = tf.maximum(add(tf.ones_like(segments), segments, count), 1)
    shape = tf.concat([[count], tf.ones(tf.rank(rows) - 1, tf.int32)], axis=0)
    return sums, tf.reshape(rows_each, shape)
