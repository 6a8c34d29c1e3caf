# SPDX-License-Identifier: Apache-2.0
"""Tell concrete values from tracers, on JAX and TensorFlow."""

import keras

from lossscale.core.state import Array


def is_concrete(value: Array) -> bool:
    """Whether the backend is JAX and the value is an array, not a tracer."""
    if keras.backend.backend() != "jax":
        return False
    import jax  # noqa: PLC0415  # of this backend alone

    return not isinstance(value, jax.core.Tracer)


def would_become_constant(value: Array) -> bool:
    """Whether `jax.jit` is tracing, and `value` would become a constant in it.

    An array made inside `jit`, `scan` or `checkpoint` is a tracer. One made inside
    plain `jax.grad` or `vmap` is not: there the current value is used.
    """
    if not is_concrete(value):
        return False
    import jax  # noqa: PLC0415  # of this backend alone

    return isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def is_traced() -> bool:
    """Whether TensorFlow is tracing: calls made now are not made at every step."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    return not tf.executing_eagerly()
