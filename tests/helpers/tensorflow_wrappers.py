"""Steps of the optimizer wrapper on TensorFlow, for several test files."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from helpers.tensorflow_modes import MODES  # noqa: E402
from helpers.tensorflow_optimizers import (  # noqa: E402
    OPTIMIZERS,
    variable,
)

v1 = tf.compat.v1
kinds = pytest.mark.parametrize("kind", OPTIMIZERS)
every_mode = pytest.mark.parametrize("mode", MODES)
BAD = (np.nan, np.inf, -np.inf)


def possible(mode, kind):
    """Leave out what the wrapped optimizer itself does not do."""
    if mode == "graph" and kind in ("keras 3", "tf_keras"):
        pytest.skip(f"{kind} optimizers are not made for graphs of TensorFlow 1")


def weights_after(mode, kind, gradients, loss_scale, optimizers=OPTIMIZERS, **options):
    """Return the weight after each of some gradients, from 1, at a rate of 1."""

    def build():
        weight = variable(kind, 1.0)
        optimizer = ls.LossScaleOptimizer(
            optimizers[kind](1.0), loss_scale(), **options
        )

        def step(gradient):
            applied = optimizer.apply_gradients([(gradient, weight)])
            with tf.control_dependencies([] if applied is None else [applied]):
                return tf.convert_to_tensor(weight), optimizer._current()

        return step

    with MODES[mode](build, np.float32(0)) as run:
        return [tuple(x.item() for x in run(np.float32(g))) for g in gradients]


def value_of(weight):
    """Return the `tf.Variable` of a variable."""
    return weight.value if isinstance(weight, keras.Variable) else weight
