"""What the optimizer wrapper refuses, and what it warns of."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tf_keras  # noqa: E402
from helpers.tensorflow_optimizers import (  # noqa: E402
    OPTIMIZERS,
    value,
    variable,
)
from helpers.tensorflow_wrappers import kinds, v1, value_of  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.errors import (  # noqa: E402
    ContextError,
    GradientError,
    SettingError,
)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "must be an optimizer"),
        ("sgd", "must be an optimizer"),
        (object(), "must be an optimizer"),
        (keras.optimizers.SGD, "must be an optimizer"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "scales its loss already",
        ),
        (
            tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD()),
            "scales its loss already",
        ),
        (keras.optimizers.SGD(loss_scale_factor=8.0), "loss_scale_factor"),
    ],
    ids=["None", "text", "object", "class", "keras", "tf_keras", "factor"],
)
def test_what_cannot_be_wrapped_is_refused(wrong, words):
    with pytest.raises(SettingError, match=words):
        ls.LossScaleOptimizer(wrong, 8)


@pytest.mark.parametrize("kind", ["keras 3", "tf_keras"])
def test_what_a_session_cannot_run_is_refused_there(kind):
    """Alone, too, these optimizers never move a weight in a graph of TensorFlow 1."""
    with tf.Graph().as_default():
        weight = tf.Variable(1.0)
        optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 8)
        with pytest.raises(ContextError, match=r"tf_keras\.optimizers\.legacy"):
            optimizer.apply_gradients([(tf.constant(1.0), weight)])


def test_the_loss_scale_cannot_be_none_and_nothing_else_either():
    descent = v1.train.GradientDescentOptimizer(1.0)
    for wrapper in (ls.LossScaleOptimizer, ls.MixedPrecisionLossScaleOptimizer):
        with pytest.raises(ValueError, match="cannot be None"):
            wrapper(descent, None)
        with pytest.raises(ValueError, match="A loss scale is"):
            wrapper(descent, "Dynamic")
    with pytest.raises(SettingError, match="LossScaleOptimizer wraps Keras's too"):
        ls.MixedPrecisionLossScaleOptimizer(keras.optimizers.SGD(), 8)


@kinds
def test_what_scales_its_loss_already_is_refused(kind):
    """The scale inside would never hear of the steps that the one outside skips."""
    inner = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 4)
    with pytest.raises(SettingError, match="scales its loss already"):
        ls.LossScaleOptimizer(inner, 8)


def test_the_wrapper_of_tensorflow_is_refused():
    descent = v1.train.GradientDescentOptimizer(1.0)
    original = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(descent, 4)
    with pytest.raises(SettingError, match="scales its loss already"):
        ls.MixedPrecisionLossScaleOptimizer(original, 8)


@kinds
def test_an_optimizer_is_not_wrapped_twice(kind):
    optimizer = OPTIMIZERS[kind](1.0)
    ls.LossScaleOptimizer(optimizer, 4)
    with pytest.raises(SettingError, match="already wrapped"):
        ls.LossScaleOptimizer(optimizer, 8)


@kinds
def test_an_optimizer_whose_scale_was_refused_can_still_be_wrapped(kind):
    optimizer = OPTIMIZERS[kind](1.0)
    with pytest.raises(SettingError, match="A loss scale is"):
        ls.LossScaleOptimizer(optimizer, "Dynamic")
    with pytest.raises(TypeError, match="count_skipped_steps"):
        ls.LossScaleOptimizer(optimizer, 8, count_skipped_steps=1)
    assert 8.0 == float(ls.LossScaleOptimizer(optimizer, 8).loss_scale())


@pytest.mark.parametrize("kind", ["keras 3", "tf_keras", "tf_keras legacy"])
def test_an_optimizer_with_one_inside_that_scales_nothing_is_wrapped(kind):
    class Outer(OPTIMIZERS[kind]):
        def __init__(self, rate):
            super().__init__(rate)
            self.inner_optimizer = OPTIMIZERS[kind](rate)

    weight = variable(kind, 5.0)
    optimizer = ls.LossScaleOptimizer(Outer(1.0), 8)
    optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])
    assert 2.0 == value(weight)


@pytest.mark.parametrize("name", ["DynamicLossScale", "FixedLossScale"])
def test_a_loss_scale_of_tensorflow_is_told_from_ours(name):
    original = getattr(v1.mixed_precision, name)(8.0)
    descent = v1.train.GradientDescentOptimizer(1.0)
    with pytest.raises(SettingError, match="TensorFlow's own") as caught:
        ls.LossScaleOptimizer(descent, original)
    assert f"{name}.from_config(" in str(caught.value)
    converted = getattr(ls, name).from_config(original.get_config())
    assert 8.0 == float(ls.LossScaleOptimizer(descent, converted).loss_scale())


@pytest.mark.parametrize("flag", [np.inf, np.nan, "yes"])
def test_a_flag_that_is_none_names_the_argument(flag):
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 2)
    with pytest.raises(GradientError, match="finite_grads must be one boolean"):
        manager.update_loss_scale(flag)
    manager.update_loss_scale((True,))
    assert 1 == int(manager.good_steps)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_custom_scale_in_float64_is_cast(mode):
    class Own(ls.LossScale):
        def __call__(self):
            return tf.constant(8.0, tf.float64)

        def update(self, grads):
            del grads
            return None, True

        def get_config(self):
            return {}

    weight = tf.Variable(5.0)
    optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), Own())

    def step():
        optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])

    (tf.function(step) if mode == "function" else step)()
    assert 2.0 == float(weight)


@kinds
@pytest.mark.parametrize("forgotten", ["get_unscaled_gradients", "get_scaled_loss"])
def test_a_call_that_was_forgotten_is_named(kind, forgotten):
    weight = variable(kind, 1.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 8)
    if forgotten == "get_scaled_loss":
        optimizer.get_unscaled_gradients([tf.constant(1.0)])
    else:
        optimizer.get_scaled_loss(tf.constant(1.0))
    with pytest.warns(UserWarning, match=rf"without {forgotten}\(\)") as record:
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert __file__ == record[0].filename


@kinds
def test_a_loop_that_scales_and_unscales_is_not_warned(kind):
    weight = variable(kind, 1.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 8)
    optimizer.apply_gradients([(tf.constant(0.5), weight)])  # by one's own means
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.convert_to_tensor(weight) * 0.5)
    gradients = tape.gradient(loss, [value_of(weight)])
    unscaled = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients([(unscaled[0], weight)])
    optimizer.minimize(lambda: 0.5 * weight, var_list=[weight])
    assert -0.5 == value(weight)
