# SPDX-License-Identifier: Apache-2.0
"""Operations of the rule and the optimizer that `keras.ops` lacks or makes slow."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from lossscale.core.headroom import NARROW
from lossscale.core.state import Array
from lossscale.core.validation import FLOAT32_MAX
from lossscale.keras.tracing import is_concrete


def dtype_name(array: Array) -> str:
    """Return the name of a dtype, the same on every backend."""
    name: str = keras.backend.standardize_dtype(array.dtype)
    return name


def read(variable: Any) -> Array:
    """Return the current value of a variable; later assignments do not change it."""
    return ops.copy(variable.value)


def where(condition: Array, a: Array, b: Array) -> Array:
    """Select; a Python number takes the dtype of the other value.

    Keras's own gives it the default dtype on torch: under a `floatx` of float16 the
    floor of 2**-126 would become 0. It also costs ten times what torch's does, a dozen
    times a step.
    """
    if keras.backend.backend() == "torch":
        import torch  # noqa: PLC0415  # of this backend alone

        return torch.where(condition, a, b)
    if isinstance(a, (int, float)) and hasattr(b, "dtype"):
        a = ops.convert_to_tensor(a, dtype_name(b))
    elif isinstance(b, (int, float)) and hasattr(a, "dtype"):
        b = ops.convert_to_tensor(b, dtype_name(a))
    return ops.where(condition, a, b)


def divide(values: Array, scale: Array) -> Array:
    """Divide; on torch without Keras, whose function costs more than the division."""
    if keras.backend.backend() == "torch":
        return values / scale
    return ops.divide(values, scale)


def largest_magnitude(values: Array) -> Array:
    """Return the largest magnitude in an array, in float32 or wider; NaN if one is.

    0 for an empty array.
    """
    dtype = dtype_name(values)
    if dtype in NARROW or not dtype.startswith(("float32", "float64")):
        values = ops.cast(values, "float32")
    backend = keras.backend.backend()
    if backend == "jax":
        return abs(values).max(initial=0.0)
    if backend == "torch":
        if not values.numel():
            return values.new_zeros(())
        return abs(values).max()
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    # As integers, whose order is that of the magnitudes, with NaN at the end: compiled
    # by XLA for a CPU, TensorFlow's reduce_max of floats passes over NaN.
    kind = tf.int64 if values.dtype == tf.float64 else tf.int32
    bits = tf.reduce_max(tf.bitcast(tf.abs(values), kind))
    return tf.bitcast(tf.maximum(bits, 0), values.dtype)


def limit(magnitude: Array) -> Array:
    """Return a magnitude, and float32's largest number for one beyond it."""
    return where(magnitude <= FLOAT32_MAX, magnitude, FLOAT32_MAX)


def stack(numbers: list[Array], like: Array | None = None) -> Array:
    """Return scalars as one array, in the widest of their dtypes or in that of another.

    Python numbers are constants.
    """
    constant = all(isinstance(number, float) for number in numbers)
    if like is not None:
        dtype = dtype_name(like)
    else:
        kinds = {dtype_name(number) for number in numbers}
        dtype = "float64" if "float64" in kinds else "float32"
    if constant:
        return ops.convert_to_tensor(numbers, dtype)
    return ops.stack([ops.cast(number, dtype) for number in numbers])


def branch(finite: Array, update: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Call one of two functions; in Python where the flag is a concrete value.

    On torch, and on JAX outside `jit`, Keras's `cond` would wait for the flag as well;
    on JAX it would compile both functions at every step, in torch.compile it counts its
    calls in a name and is compiled again and again.
    """
    if keras.backend.backend() == "torch" or is_concrete(finite):
        return update() if finite else skip()
    return ops.cond(finite, update, skip)


def values_of(gradient: Array) -> Array:
    """Return a gradient, or the values of a sparse one of TensorFlow."""
    return gradient.values if hasattr(gradient, "dense_shape") else gradient


def map_values(function: Any, gradient: Array) -> Array:
    """Apply a function to a gradient, or to the values of a sparse one of TensorFlow.

    `tf.IndexedSlices` and `tf.SparseTensor` are recognised by their `dense_shape`, so
    that TensorFlow need not be imported.
    """
    if not hasattr(gradient, "dense_shape"):
        return function(gradient)
    return type(gradient)(
        values=function(gradient.values),
        indices=gradient.indices,
        dense_shape=gradient.dense_shape,
    )


def to_host(value: Array) -> Any:
    """Return a tensor as a NumPy array; waits for the device."""
    # Keras 3.15 converts in a way that NumPy 2.4 announces to end.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return ops.convert_to_numpy(value)
