"""What an update, or a step, returns: None eagerly, a tensor in a graph.

An op can neither be passed through `tf.identity` nor returned from a `tf.function`;
what the originals returned could.
"""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import numpy as np  # noqa: E402
from helpers.tensorflow_optimizers import OPTIMIZERS, value, variable  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402

v1 = tf.compat.v1

UPDATES = {
    "dynamic": lambda scale, grads: scale.update(grads)[0],
    "dynamic, from a flag": lambda scale, grads: scale.update_from_finite(True)[0],
    "manager": lambda scale, grads: scale.update_loss_scale(True),
}
SCALES = {
    "dynamic": lambda: ls.DynamicLossScale(8, 1),
    "dynamic, from a flag": lambda: ls.DynamicLossScale(8, 1),
    "manager": lambda: ls.ExponentialUpdateLossScaleManager(8, 1),
}


def current(scale):
    manager = isinstance(scale, ls.LossScaleManager)
    return scale.get_loss_scale() if manager else scale()


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("way", ["plain", "identity", "group", "dependency"])
def test_an_update_can_be_run_passed_on_grouped_and_depended_on(kind, way):
    with tf.Graph().as_default(), v1.Session() as session:
        scale = SCALES[kind]()
        update = UPDATES[kind](scale, [tf.constant(1.0)])
        if way == "identity":
            update = tf.identity(update)
        elif way == "group":
            update = tf.group(update, tf.no_op())
        elif way == "dependency":
            with tf.control_dependencies([update]):
                update = tf.constant(3)
        session.run(v1.global_variables_initializer())
        for expected in (16.0, 32.0):
            session.run(update)
            assert expected == session.run(current(scale))


@pytest.mark.parametrize("kind", SCALES)
def test_an_update_can_be_returned_from_a_function(kind):
    scale = SCALES[kind]()
    update = tf.function(lambda: UPDATES[kind](scale, [tf.constant(1.0)]))
    assert isinstance(update(), tf.Tensor)
    assert 16.0 == float(current(scale))


def test_fixed_scales_return_what_can_be_returned_too():
    fixed, manager = ls.FixedLossScale(8), ls.FixedLossScaleManager(8)
    update = tf.function(
        lambda: (fixed.update([tf.constant(1.0)])[0], manager.update_loss_scale(True))
    )
    assert all(isinstance(found, tf.Tensor) for found in update())
    with tf.Graph().as_default(), v1.Session() as session:
        session.run([tf.identity(fixed.update(None)[0]), manager.update_loss_scale(1)])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("scale", [8, "dynamic"])
def test_a_step_can_be_returned_from_a_function_and_says_if_it_was_applied(kind, scale):
    weight = variable(kind, 1.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), scale)

    @tf.function
    def minimize(factor):
        return optimizer.minimize(lambda: factor * weight, var_list=[weight])

    @tf.function
    def apply(gradient):
        return optimizer.apply_gradients([(gradient, weight)])

    for step in (minimize, apply):
        assert bool(step(tf.constant(0.25)))
        assert not bool(step(tf.constant(np.nan, tf.float32)))
    assert 0.5 == value(weight)


@pytest.mark.parametrize("kind", ["v1", "tf_keras legacy"])
@pytest.mark.parametrize("scale", [8, "dynamic"])
def test_a_step_can_be_run_passed_on_grouped_and_depended_on(kind, scale):
    with tf.Graph().as_default(), v1.Session() as session:
        weight = variable(kind, 5.0)
        optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), scale)
        step = optimizer.minimize(lambda: 1.0 * weight, var_list=[weight])
        grouped, passed = tf.group(step), tf.identity(step)
        with tf.control_dependencies([step]):
            after = tf.constant(3)
        session.run(v1.global_variables_initializer())
        for count, each in enumerate((step, grouped, passed, after), start=1):
            session.run(each)
            assert 5.0 - count == session.run(weight)


def test_eagerly_there_is_nothing_to_return():
    weight = tf.Variable(1.0)
    descent = v1.train.GradientDescentOptimizer(1.0)
    optimizer = ls.LossScaleOptimizer(descent, "dynamic")
    assert optimizer.minimize(lambda: 1.0 * weight, var_list=[weight]) is None
    assert ls.DynamicLossScale().update([tf.constant(1.0)])[0] is None
