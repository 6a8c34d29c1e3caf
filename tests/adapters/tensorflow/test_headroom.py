"""Finite gradients that are too large for the optimizer: skipped, and the scale stays.

No lower scale makes a true gradient smaller.
"""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tf_keras  # noqa: E402
from helpers.tensorflow_modes import MODES  # noqa: E402
from helpers.tensorflow_optimizers import (  # noqa: E402
    ADAM,
    MOMENTUM,
    OPTIMIZERS,
    state_of,
    value,
    variable,
)

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402

v1 = tf.compat.v1
kinds = pytest.mark.parametrize("kind", OPTIMIZERS)
every_mode = pytest.mark.parametrize("mode", MODES)


class Counting(ls.LossScale):
    """A loss scale of the user's: grows at every update, and never refuses."""

    def __init__(self):
        self.value = tf.Variable(8.0, trainable=False)

    def __call__(self):
        return tf.convert_to_tensor(self.value)

    def update(self, grads):
        return self.value.assign_add(1.0), tf.constant(True)

    def get_config(self):
        return {}


class CountingManager(ls.LossScaleManager):
    """A manager of the user's: grows at every update."""

    def __init__(self):
        self.value = tf.Variable(8.0, trainable=False)

    def get_loss_scale(self):
        return tf.convert_to_tensor(self.value)

    def update_loss_scale(self, finite_grads):
        return self.value.assign_add(1.0)


SCALES = {
    "dynamic": lambda: ls.DynamicLossScale(8.0, 2),
    "manager": lambda: ls.ExponentialUpdateLossScaleManager(8.0, 2, 1),
    "fixed": lambda: ls.FixedLossScale(8.0),
    "fixed manager": lambda: ls.FixedLossScaleManager(8.0),
    "own": Counting,
    "own manager": CountingManager,
}


@every_mode
@kinds
@pytest.mark.parametrize("scale", SCALES)
def test_a_gradient_that_cannot_be_squared_leaves_everything(mode, kind, scale):
    if mode == "graph" and kind in ("keras 3", "tf_keras"):
        pytest.skip(f"{kind} optimizers are not made for graphs of TensorFlow 1")

    def build():
        weight = variable(kind, 1.0)
        optimizer = ls.LossScaleOptimizer(ADAM[kind](1.0), SCALES[scale]())

        def step(gradient):
            applied = optimizer.apply_gradients([(gradient, weight)])
            with tf.control_dependencies([] if applied is None else [applied]):
                return tf.convert_to_tensor(weight), optimizer._current()

        return step

    with MODES[mode](build, np.float32(0)) as run:
        for gradient in (1e20, -3e38):
            seen = [x.item() for x in run(np.float32(gradient))]
            assert [1.0, 8.0] == seen
        weight, _ = run(np.float32(1e18))
        assert np.isfinite(weight)
        assert 1.0 != weight


def test_the_counters_stay_as_well():
    weight, loss_scale = tf.Variable(1.0), ls.DynamicLossScale(8.0, 3)
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 3, 3)
    for scale in (loss_scale, manager):
        optimizer = ls.LossScaleOptimizer(v1.train.AdamOptimizer(), scale)
        for gradient in (1.0, 1e20, 1e20, 1.0):
            optimizer.apply_gradients([(tf.constant(gradient), weight)])
        assert 2 == int(scale.good_steps)
    assert 0 == int(manager.bad_steps)


def test_an_infinity_beside_a_large_gradient_is_an_overflow():
    weights = [tf.Variable(1.0), tf.Variable(1.0)]
    optimizer = ls.LossScaleOptimizer(v1.train.AdamOptimizer(), ls.DynamicLossScale(8))
    grads = [tf.constant(3e38), tf.constant(np.inf, tf.float32)]
    optimizer.apply_gradients(zip(grads, weights, strict=True))
    assert 4.0 == float(optimizer.loss_scale())


def test_a_large_gradient_is_applied_with_a_fixed_scale_that_lets_all_pass():
    weight = tf.Variable(1.0)
    descent = v1.train.GradientDescentOptimizer(1.0)
    optimizer = ls.LossScaleOptimizer(descent, 8, skip_nonfinite=False)
    optimizer.apply_gradients([(tf.constant(3e38), weight)])
    assert value(weight) < -2e38


@kinds
def test_what_is_only_added_may_be_larger(kind):
    weight = variable(kind, 1.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1e-20), ls.DynamicLossScale(8))
    optimizer.apply_gradients([(tf.constant(1e28), weight)])
    assert -1e8 == pytest.approx(value(weight), rel=1e-6)
    optimizer.apply_gradients([(tf.constant(1e38), weight)])
    assert -1e8 == pytest.approx(value(weight), rel=1e-6)
    assert 8.0 == float(optimizer.loss_scale())


@kinds
def test_a_float16_variable_refuses_what_it_cannot_hold_and_the_scale_stays(kind):
    weight = variable(kind, 1.0, "float16")
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8))
    for _ in range(200):
        optimizer.apply_gradients([(tf.constant(1e5), weight)])
    assert (1.0, 8.0) == (value(weight), float(optimizer.loss_scale()))


@pytest.mark.parametrize(
    ("option", "gradient"),
    [("clipvalue", 1e37), ("clipnorm", 1e19), ("global_clipnorm", 1e19)],
)
def test_what_is_clipped_before_it_is_squared_is_applied(option, gradient):
    for module in (keras, tf_keras):
        weight = variable("keras 3" if module is keras else "tf_keras", 1.0)
        adam = module.optimizers.Adam(0.1, **{option: 1.0})
        optimizer = ls.LossScaleOptimizer(adam, ls.DynamicLossScale(8))
        optimizer.apply_gradients([(tf.constant(gradient), weight)])
        assert 0.9 == pytest.approx(value(weight), abs=1e-3)


def test_a_norm_that_is_infinite_skips_the_step():
    weights = [keras.Variable(1.0), keras.Variable(1.0)]
    clipped = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    optimizer = ls.LossScaleOptimizer(clipped, ls.DynamicLossScale(8))
    optimizer.apply_gradients([(tf.constant(1.5e19), weight) for weight in weights])
    assert [1.0, 1.0] == [value(weight) for weight in weights]
    assert 8.0 == float(optimizer.loss_scale())


def test_micro_batches_may_not_add_up_to_infinity():
    weight = keras.Variable(1.0)
    added = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = ls.LossScaleOptimizer(added, ls.DynamicLossScale(8))
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant(3e38), weight)])
    assert (1.0, 8.0) == (value(weight), float(optimizer.loss_scale()))


ENDLESS = {
    "v1 Adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "v1 Ftrl": lambda: v1.train.FtrlOptimizer(0.1),
    "v1 ProximalAdagrad": lambda: v1.train.ProximalAdagradOptimizer(0.1),
    "v1 Momentum": lambda: v1.train.MomentumOptimizer(1.0, 0.9),
    "v1 GradientDescent": lambda: v1.train.GradientDescentOptimizer(1.0),
    "keras Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "keras Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "keras SGD": lambda: keras.optimizers.SGD(1.0, momentum=0.99),
    "tf_keras Adagrad": lambda: tf_keras.optimizers.Adagrad(0.1),
    "tf_keras Ftrl": lambda: tf_keras.optimizers.Ftrl(0.1),
    "legacy Adagrad": lambda: tf_keras.optimizers.legacy.Adagrad(0.1),
    "legacy Ftrl": lambda: tf_keras.optimizers.legacy.Ftrl(0.1),
    "legacy SGD": lambda: tf_keras.optimizers.legacy.SGD(1.0, momentum=0.9),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_no_number_of_large_gradients_fills_the_state(name):
    """Each is far within float32; without a bound their sum, or that of squares, is
    not after some hundred steps."""
    weight = variable("keras 3" if name.startswith("keras") else "v1", [1.0] * 4)
    optimizer = ls.LossScaleOptimizer(ENDLESS[name](), ls.DynamicLossScale(8.0))

    @tf.function
    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    for _ in range(400):
        step(tf.constant([1.8e19, 2e15, 1e37, 7e28][:4]))
        step(tf.constant([1.5e15, 2e15, 1.0, -2e15]))
        step(tf.constant([1.8e19, 0.0, 1.0, -1.8e19]))
        step(tf.constant([7e28, 1e28, -1e27, 0.0]))
    assert np.isfinite(value(weight)).all()
    assert all(np.isfinite(np.asarray(each)).all() for each in state_of(optimizer))


@kinds
def test_an_ordinary_gradient_is_never_too_large(kind):
    for make in (OPTIMIZERS, MOMENTUM, ADAM):
        weight = variable(kind, 1.0)
        optimizer = ls.LossScaleOptimizer(make[kind](1e-3), ls.DynamicLossScale(8, 1))
        optimizer.apply_gradients([(tf.constant(1e15), weight)])
        assert 16.0 == float(optimizer.loss_scale())
        assert 1.0 != value(weight)


@pytest.mark.parametrize(
    "make",
    [
        v1.train.AdamOptimizer,
        v1.train.AdadeltaOptimizer,
        lambda: tf_keras.optimizers.Adam(epsilon=1e-8),
        tf_keras.optimizers.Adamax,
        tf_keras.optimizers.legacy.Adamax,
    ],
)
def test_an_epsilon_that_is_zero_in_float16_is_refused(make):
    weight = tf.Variable(tf.ones(2, tf.float16))
    optimizer = ls.LossScaleOptimizer(make(), ls.DynamicLossScale(8.0, 1))
    with pytest.raises(SettingError, match="is 0 in float16"):
        optimizer.apply_gradients([(tf.zeros(2, tf.float16), weight)])
    assert 8.0 == float(optimizer.loss_scale())


@pytest.mark.parametrize(
    "make",
    [
        lambda: v1.train.AdamOptimizer(epsilon=1e-4),
        lambda: v1.train.AdadeltaOptimizer(epsilon=1e-4),
        tf_keras.optimizers.Adam,
    ],
)
def test_zero_and_small_gradients_leave_float16_weights_finite(make):
    weight = tf.Variable(tf.ones(4, tf.float16))
    optimizer = ls.LossScaleOptimizer(make(), 8)
    for _ in range(5):
        gradient = tf.constant([0.0, 1e-5, 1e-3, 1.0], tf.float16)
        optimizer.apply_gradients([(gradient, weight)])
    assert np.isfinite(weight.numpy()).all()
