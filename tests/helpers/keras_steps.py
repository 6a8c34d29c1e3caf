"""Steps of an optimizer with given gradients, compiled where the backend compiles."""

import numpy as np

from helpers.keras_backend import BACKEND, keras, numpy


class Steps:
    """An optimizer with variables of its own; Keras's class or ours.

    TensorFlow runs in a `tf.function`, JAX in a `jit` of `stateless_apply`.
    """

    def __init__(self, optimizer, *values, dtype="float32"):
        self.optimizer = optimizer
        self.variables = [
            keras.Variable(np.asarray(value), dtype=dtype) for value in values
        ]
        optimizer.build(self.variables)
        self._compiled = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[
            BACKEND
        ](optimizer, self.variables)

    def step(self, *gradients):
        """Apply scaled gradients."""
        tensors = [
            gradient
            if gradient is None or hasattr(gradient, "dense_shape")
            else keras.ops.convert_to_tensor(gradient)
            for gradient in gradients
        ]
        self._compiled(tensors)

    def weights(self):
        return [numpy(variable) for variable in self.variables]

    def scale(self):
        return numpy(self.optimizer.dynamic_scale).item()

    def good(self):
        return numpy(self.optimizer.step_counter).item()

    def iterations(self):
        return int(numpy(self.optimizer.iterations))

    def restart(self, scale):
        """Go on from a scale, with nothing counted."""
        self.optimizer.dynamic_scale.assign(scale)
        self.optimizer.step_counter.assign(0)


def _tensorflow(optimizer, variables):
    import tensorflow as tf

    # AutoGraph would convert Keras as well; test_on_tensorflow.py traces with it.
    return tf.function(
        lambda gradients: optimizer.apply(gradients, variables),
        reduce_retracing=True,
        autograph=False,
    )


def _torch(optimizer, variables):
    return lambda gradients: optimizer.apply(gradients, variables)


def _jax(optimizer, variables):
    import jax

    jitted = jax.jit(optimizer.stateless_apply)

    def step(gradients):
        results = jitted(
            [variable.value for variable in optimizer.variables],
            gradients,
            [variable.value for variable in variables],
        )
        for places, values in zip(
            (variables, optimizer.variables), results, strict=True
        ):
            for place, value in zip(places, values, strict=True):
                place.assign(value)

    return step


def check_finite(arrays, what=""):
    """Raise unless every number of some arrays is finite."""
    for array in arrays:
        if not np.isfinite(np.asarray(array, np.float64)).all():
            message = f"{what}: not finite: {array}"
            raise AssertionError(message)
