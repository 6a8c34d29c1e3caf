# SPDX-License-Identifier: Apache-2.0
"""One gradient of any kind that TensorFlow has: dense, sparse or ragged.

A sparse gradient (`tf.IndexedSlices`) stays sparse and a ragged one ragged: each
function works on the values of a gradient. Anything that is not floating-point is a
`GradientError` that names the leaf.
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

_UPCAST = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.float32: tf.float32,
    tf.float64: tf.float64,
}
"""The dtypes of gradients, and the dtype in which each is unscaled."""


def values_of(leaf: Leaf) -> Array:
    """Return the numbers of a gradient as one dense tensor."""
    if isinstance(leaf, tf.IndexedSlices):
        return leaf.values
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.flat_values
    return leaf


def replace_values(leaf: Leaf, new: Array) -> Leaf:
    """Return a gradient of the same kind and indices with other numbers."""
    if isinstance(leaf, tf.IndexedSlices):
        return tf.IndexedSlices(new, leaf.indices, leaf.dense_shape)
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.with_flat_values(new)
    return new


def validate_leaf(what: str, path: str, leaf: Any) -> Leaf:
    """Return a loss or gradient as floating-point tensors, or raise.

    Raises:
        GradientError: If it is of another dtype or kind.
    """
    kind: Any
    if isinstance(leaf, (tf.IndexedSlices, tf.RaggedTensor)):
        kind = values_of(leaf).dtype
    elif isinstance(leaf, tf.SparseTensor):
        kind = "a tf.SparseTensor"
    else:
        try:
            leaf = tf.convert_to_tensor(leaf)
            kind = leaf.dtype
        except (TypeError, ValueError):
            kind = type(leaf).__name__
    if kind not in _UPCAST:
        name = getattr(kind, "name", kind)
        message = (
            f"The {what}{' at ' + path if path else ''} is {name}, expected a float16, "
            "bfloat16, float32 or float64 tensor, tf.IndexedSlices or tf.RaggedTensor. "
            "Leave out what is not differentiated, or put None in its place."
        )
        raise GradientError(message)
    return leaf


def upcast(leaf: Leaf) -> Leaf:
    """Return a gradient in float32 if it is narrower, else as it is."""
    return cast(leaf, _UPCAST[values_of(leaf).dtype])


def cast(leaf: Leaf, dtype: Any) -> Leaf:
    """Return a gradient in another dtype; in its own it stays the same object."""
    numbers = values_of(leaf)
    if numbers.dtype == dtype:
        return leaf
    return replace_values(leaf, tf.cast(numbers, dtype))


def multiply(leaf: Leaf, factor: Array) -> Leaf:
    """Return a gradient times a float32 factor, in float32 or wider."""
    numbers = values_of(leaf)
    dtype = _UPCAST[numbers.dtype]
    product = tf.cast(numbers, dtype) * tf.cast(factor, dtype)
    return replace_values(leaf, product)


def unscale(path: str, leaf: Any, inverse: Array) -> Leaf:
    """Return a gradient times 1 / scale, in float32 or wider, or raise."""
    is_tensor = isinstance(leaf, (tf.Tensor, tf.IndexedSlices, tf.RaggedTensor))
    if not is_tensor or values_of(leaf).dtype not in _UPCAST:
        leaf = validate_leaf("gradient", path, leaf)
    return multiply(leaf, inverse)


def dtype_name(leaf: Leaf) -> str:
    """Return the name of a gradient's dtype."""
    return str(values_of(leaf).dtype.name)


def largest_magnitude(leaf: Leaf) -> Array:
    """Return the largest magnitude in a gradient, in float32 or wider; NaN if one is.

    0 for a gradient without numbers.
    """
    numbers = values_of(upcast(leaf))
    # As integers, whose order is that of the magnitudes, with NaN at the end: compiled
    # by XLA for a CPU, reduce_max of floats passes over NaN.
    kind = tf.int64 if numbers.dtype == tf.float64 else tf.int32
    bits = tf.reduce_max(tf.bitcast(tf.abs(numbers), kind))
    return tf.bitcast(tf.maximum(bits, tf.zeros((), kind)), numbers.dtype)


def has_finite_values(leaf: Leaf) -> Array:
    """Return whether every number of a gradient is finite."""
    return tf.reduce_all(tf.math.is_finite(values_of(leaf)))


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
    numbers = values_of(leaf)
    # In float32, where the bound is not rounded; NaN and infinity fail as well.
    return tf.reduce_all(tf.abs(tf.cast(numbers, _UPCAST[numbers.dtype])) <= largest)


def _is_sparse_within(leaf: Any, largest: float, dtype: str, addends: int) -> Array:
    """Return whether the sums of a sparse gradient's rows stay within a bound.

    Magnitudes are added: the order in which optimizers add rows is not known, and
    addends that cancel in the end may have overflowed on the way.
    """
    magnitudes = tf.abs(values_of(upcast(leaf)))
    count = tf.shape(magnitudes)[0]

    def are_within(sums: Array, rows: Array) -> Array:
        bound = largest_sum(dtype, tf.cast(rows * addends, sums.dtype)) / addends
        return tf.reduce_all(sums <= tf.minimum(bound, _as_bound(largest, sums)))

    # However the indices repeat, no sum exceeds that of all rows.
    all_within = are_within(tf.reduce_sum(magnitudes, axis=0), tf.maximum(count, 1))
    return _either(
        all_within, lambda: are_within(*_add_rows(leaf.indices, magnitudes, count))
    )


def _as_bound(largest: float, like: Array) -> Array:
    """Return a bound in the dtype of the sums; at most the largest number of that."""
    return tf.constant(min(largest, float(like.dtype.max)), like.dtype)


def _either(first: Array, second: Callable[[], Array]) -> Array:
    """Return `first or second()`; the second is costly and seldom needed."""
    if tf.executing_eagerly():
        return first if bool(first) else second()
    return tf.cond(first, lambda: tf.constant(True), second, name="either")


def _add_rows(indices: Array, rows: Array, count: Array) -> tuple[Array, Array]:
    """Return the sums over rows with the same index, and how many rows each has.

    Sorted by index, equal indices are neighbours and can be numbered without
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
