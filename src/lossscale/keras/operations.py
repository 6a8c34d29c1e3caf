# SPDX-License-Identifier: Apache-2.0
"""What the rule and the optimizer need of `keras.ops`, on every backend."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from lossscale.core.headroom import NARROW
from lossscale.core.state import Array
from lossscale.keras.tracing import is_concrete


def dtype_of(array: Array) -> str:
    """Return the name of a dtype, the same on every backend."""
    name: str = keras.backend.standardize_dtype(array.dtype)
    return name


def read(variable: Any) -> Array:
    """Return the value of a variable now; it does not change with the variable."""
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
        a = ops.convert_to_tensor(a, dtype_of(b))
    elif isinstance(b, (int, float)) and hasattr(a, "dtype"):
        b = ops.convert_to_tensor(b, dtype_of(a))
    return ops.where(condition, a, b)


def divided(values: Array, scale: Array) -> Array:
    """Divide; on torch without Keras, which costs more than the division there."""
    if keras.backend.backend() == "torch":
        return values / scale
    return ops.divide(values, scale)


def are_within(values: Array, limit: Array) -> Array:
    """Return whether all magnitudes are at most the limit; NaN never is.

    The limit is not rounded to a narrow dtype. Operators and not `keras.ops`: on torch
    those cost more than the comparison.
    """
    if dtype_of(values) in NARROW:
        values = ops.cast(values, "float32")
    within = abs(values) <= limit
    return ops.all(within) if keras.backend.backend() == "tensorflow" else within.all()


def branch(finite: Array, update: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Call one of two functions; in Python where the flag is at hand.

    On torch, and on JAX outside `jit`, Keras's `cond` would wait for the flag as well;
    on JAX it would compile both functions at every step, in torch.compile it counts its
    calls in a name and is compiled again and again.
    """
    if keras.backend.backend() == "torch" or is_concrete(finite):
        return update() if finite else skip()
    return ops.cond(finite, update, skip)


def map_values(function: Any, gradient: Array) -> Array:
    """Apply a function to a gradient, or to the values of a sparse one of TensorFlow.

    `tf.IndexedSlices` and `tf.SparseTensor` are told by their `dense_shape`, so that
    TensorFlow need not be imported.
    """
    if not hasattr(gradient, "dense_shape"):
        return function(gradient)
    return type(gradient)(
        values=function(gradient.values),
        indices=gradient.indices,
        dense_shape=gradient.dense_shape,
    )


def all_true(flags: list[Array]) -> Array:
    """Return whether all of some boolean scalars are true; none at all are."""
    if not flags:
        return ops.convert_to_tensor(True, "bool")  # a tensor of it
    return flags[0] if len(flags) == 1 else ops.all(ops.stack(flags))
