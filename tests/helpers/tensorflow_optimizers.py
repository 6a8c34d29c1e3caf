"""Optimizers of every kind that can be wrapped, by name."""

import keras
import tensorflow as tf
import tf_keras

OPTIMIZERS = {
    "v1": tf.compat.v1.train.GradientDescentOptimizer,
    "keras 3": keras.optimizers.SGD,
    "tf_keras": tf_keras.optimizers.SGD,
    "tf_keras legacy": tf_keras.optimizers.legacy.SGD,
}
MOMENTUM = {
    "v1": lambda rate: tf.compat.v1.train.MomentumOptimizer(rate, 0.5),
    "keras 3": lambda rate: keras.optimizers.SGD(rate, momentum=0.5),
    "tf_keras": lambda rate: tf_keras.optimizers.SGD(rate, momentum=0.5),
    "tf_keras legacy": lambda rate: tf_keras.optimizers.legacy.SGD(rate, momentum=0.5),
}
ADAM = {
    "v1": tf.compat.v1.train.AdamOptimizer,
    "keras 3": keras.optimizers.Adam,
    "tf_keras": tf_keras.optimizers.Adam,
    "tf_keras legacy": tf_keras.optimizers.legacy.Adam,
}


def variable(kind, value, dtype="float32"):
    """Return a variable of the kind that an optimizer is used with."""
    if kind == "keras 3":
        return keras.Variable(value, dtype=dtype)
    return tf.Variable(value, dtype=dtype)


def value(found):
    """Return a variable or tensor as a Python number or list."""
    tensor = found.value if isinstance(found, keras.Variable) else found
    return tf.convert_to_tensor(tensor).numpy().tolist()


def state_of(optimizer):
    """Return the values of all variables of a wrapped optimizer."""
    found = optimizer.inner_optimizer.variables
    return [value(v) for v in (found() if callable(found) else found)]
