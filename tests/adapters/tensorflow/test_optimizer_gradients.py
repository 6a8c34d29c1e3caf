"""Gradients of every kind in the optimizer wrapper, and what happens to them."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tf_keras  # noqa: E402
from helpers.tensorflow_optimizers import (  # noqa: E402
    ADAM,
    MOMENTUM,
    OPTIMIZERS,
    state_of,
    value,
    variable,
)
from helpers.tensorflow_wrappers import kinds, v1  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.errors import (  # noqa: E402
    GradientError,
    SettingError,
    StructureError,
)


def test_gradients_that_are_none_are_named():
    weight = tf.Variable(1.0, name="kernel")
    optimizer = ls.LossScaleOptimizer(
        v1.train.GradientDescentOptimizer(1.0), ls.DynamicLossScale(8, 1)
    )
    with pytest.raises(GradientError, match="kernel"):
        optimizer.apply_gradients([(tf.constant(1), weight)])
    assert 8.0 == float(optimizer.loss_scale())


@kinds
@pytest.mark.parametrize("optimizers", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_whatever_gradients_arrive_weights_and_slots_stay_finite(kind, optimizers):
    rng = np.random.default_rng(7)
    weight = variable(kind, np.ones(6, np.float32))
    optimizer = ls.LossScaleOptimizer(
        optimizers[kind](1e-3), ls.DynamicLossScale(2.0**15, 3, floor=2.0**-20)
    )

    @tf.function
    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    awful = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 7e28, 1e-45, 0.0, -0.0])
    for _ in range(300):
        gradient = rng.standard_normal(6)
        if rng.random() < 0.5:
            gradient[rng.integers(6)] = rng.choice(awful)
        step(tf.constant(gradient, tf.float32))
        assert np.isfinite(value(weight)).all()
        assert all(np.isfinite(np.asarray(x)).all() for x in state_of(optimizer))
        assert 2.0**-20 <= float(optimizer.loss_scale()) < np.inf


@kinds
def test_rows_are_added_up_in_float16_for_a_float16_variable(kind):
    table = variable(kind, [[1.0], [2.0]], "float16")
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8))
    rows = np.full((271, 1), 20.0, np.float16)
    rows[0] = 60000.0
    indices = tf.zeros(len(rows), tf.int32)
    sparse = tf.IndexedSlices(tf.constant(rows), indices, tf.constant([2, 1]))
    optimizer.apply_gradients([(sparse, table)])
    assert [[1.0], [2.0]] == value(table)


@kinds
def test_a_gradient_of_another_shape_changes_nothing(kind):
    first, second = variable(kind, [1.0, 1.0]), variable(kind, [1.0, 1.0])
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8, 1))
    with pytest.raises(StructureError, match=r"shape \(3,\)"):
        optimizer.apply_gradients([(tf.ones(2), first), (tf.ones(3), second)])
    wide = tf.IndexedSlices(tf.ones((1, 3)), tf.constant([0]))
    with pytest.raises(StructureError, match="shape"):
        optimizer.apply_gradients([(tf.ones(2), first), (wide, second)])
    assert ([1.0, 1.0], 8.0) == (value(first), float(optimizer.loss_scale()))


def test_an_optimizer_that_changes_gradients_after_the_check_is_refused():
    descent = tf_keras.optimizers.legacy.SGD(1.0, gradient_transformers=[list])
    with pytest.raises(SettingError, match="after the check"):
        ls.LossScaleOptimizer(descent, 8)


@pytest.mark.parametrize("factor", [np.nan, 0.5])
def test_what_an_aggregator_returns_is_checked_and_applied_as_it_is(factor):
    def aggregate(pairs):
        return [(gradient * factor, weight) for gradient, weight in pairs]

    weight = tf.Variable(1.0)
    descent = tf_keras.optimizers.legacy.SGD(1.0, gradient_aggregator=aggregate)
    optimizer = ls.LossScaleOptimizer(descent, ls.DynamicLossScale(2.0))
    optimizer.minimize(lambda: weight * 1.0, [weight])
    expected = (1.0, 1.0) if np.isnan(factor) else (0.5, 2.0)
    assert expected == (float(weight), float(optimizer.loss_scale()))


def test_settings_are_not_set_in_vain_and_iterations_can_be_set():
    optimizer = ls.LossScaleOptimizer(tf_keras.optimizers.SGD(1.0), 8)
    for name in ("nesterov", "momentum"):
        with pytest.raises(AttributeError, match=f"inner_optimizer.{name}"):
            setattr(optimizer, name, 0.5)
    optimizer.iterations = tf.Variable(7, dtype=tf.int64)
    assert 7 == value(optimizer.inner_optimizer.iterations)
    with pytest.raises(AttributeError):
        optimizer.loss_scale = 4
    optimizer.note = "of one's own"
    assert "of one's own" == optimizer.note


def test_arguments_that_a_keras_optimizer_does_not_take_are_refused():
    weight = keras.Variable(1.0)
    optimizer = ls.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8)
    with pytest.raises(TypeError, match="gate_gradients"):
        optimizer.minimize(lambda: 1.0 * weight, [weight], gate_gradients=1)
    optimizer.minimize(lambda: 1.0 * weight, [weight], grad_loss=tf.constant(3.0))
    assert -0.5 == value(weight)


def test_the_gradient_of_the_loss_may_be_given_for_a_float16_loss():
    with tf.Graph().as_default(), v1.Session() as session:
        weight = tf.Variable(5.0)
        optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), 10)
        loss = tf.cast(weight, tf.float16)
        ((plain, _),) = optimizer.compute_gradients(loss, [weight])
        ((tripled, _),) = optimizer.compute_gradients(
            loss, [weight], grad_loss=tf.constant(3.0, tf.float16)
        )
        (scaled,) = tf.gradients(optimizer.get_scaled_loss(loss), [weight])
        session.run(v1.global_variables_initializer())
        assert [1.0, 3.0, 10.0] == session.run([plain, tripled, scaled])


def test_a_manager_may_return_a_tensor_in_a_graph():
    class Doubling(ls.LossScaleManager):
        def __init__(self):
            self.value = tf.Variable(8.0, trainable=False)

        def get_loss_scale(self):
            return tf.convert_to_tensor(self.value)

        def update_loss_scale(self, finite_grads):
            return tf.identity(self.value.assign(self.value * 2.0))

    with tf.Graph().as_default(), v1.Session() as session:
        weight, manager = tf.Variable(1.0), Doubling()
        optimizer = ls.LossScaleOptimizer(
            v1.train.GradientDescentOptimizer(1.0), manager
        )
        train = optimizer.apply_gradients([(tf.constant(0.5), weight)])
        session.run(v1.global_variables_initializer())
        session.run(train)
        assert 16.0 == session.run(manager.value)


def test_the_op_of_a_loss_scale_of_ones_own_runs_in_a_session():
    class Counting(ls.LossScale):
        def __init__(self):
            self.asked = tf.Variable(0, trainable=False)

        def __call__(self):
            return tf.constant(8.0)

        def update(self, grads):
            return self.asked.assign_add(1), tf.constant(True)

        def get_config(self):
            return {}

    with tf.Graph().as_default(), v1.Session() as session:
        weight, loss_scale = tf.Variable(1.0), Counting()
        optimizer = ls.LossScaleOptimizer(
            v1.train.GradientDescentOptimizer(1.0), loss_scale
        )
        train = optimizer.apply_gradients([(tf.constant(0.5), weight)])
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        assert 3 == session.run(loss_scale.asked)


def test_gradients_come_in_the_dtype_of_their_variable_and_are_checked():
    half = tf.Variable(1.0, dtype=tf.float16)
    optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), 2.0**17)
    scaled = optimizer.get_scaled_loss(tf.constant(2.0, tf.float16))
    assert (tf.float32, 2.0**18) == (scaled.dtype, float(scaled))
    optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), 8)
    ((gradient, _),) = optimizer.compute_gradients(lambda: half * 2.0, [half])
    assert tf.float16 == gradient.dtype
    with pytest.raises(GradientError):
        optimizer.get_unscaled_gradients([tf.constant(1)])


def test_autograph_leaves_our_methods_alone():
    for kind, names in (
        (ls.LossScaleOptimizer, ("minimize", "apply_gradients", "get_scaled_loss")),
        (ls.DynamicLossScale, ("update", "__call__")),
        (ls.ExponentialUpdateLossScaleManager, ("update_loss_scale",)),
    ):
        for name in names:
            method = vars(kind)[name]  # decorated here, not only inherited
            assert callable(method.__wrapped__)
            assert "autograph" in method.__code__.co_filename
