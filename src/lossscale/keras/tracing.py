# SPDX-License-Identifier: Apache-2.0
"""What is a value now, and what stands for one in a program being traced."""

import keras

from lossscale.core.state import Array


def is_concrete(value: Array) -> bool:
    """Whether this is JAX, and the value is at hand: no tracer that stands for it."""
    if keras.backend.backend() != "jax":
        return False
    import jax  # noqa: PLC0415  # of this backend alone

    return not isinstance(value, jax.core.Tracer)


def would_be_frozen(value: Array) -> bool:
    """Whether `jax.jit` is tracing, and `value` would become a constant in it.

    An array made inside `jit`, `scan` or `checkpoint` is a tracer. One made inside
    plain `jax.grad` or `vmap` is not: there a value is as it is now.
    """
    if not is_concrete(value):
        return False
    import jax  # noqa: PLC0415  # of this backend alone

    return isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def is_traced() -> bool:
    """Whether TensorFlow is tracing: what is called now is not called at every step."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    return not tf.executing_eagerly()
