"""tf_keras's `compile` and `fit`, methods, configs and checkpoints with our wrapper."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from helpers.tensorflow_optimizers import value

import lossscale.tensorflow as ls
from lossscale.errors import SettingError, SettingTypeError
from lossscale.tensorflow import tf_keras as drop_in

v1 = tf.compat.v1
KINDS = {
    "new": tf_keras.optimizers,
    "legacy": tf_keras.optimizers.legacy,
}


@pytest.fixture(params=KINDS)
def optimizers(request):
    """The module of one generation of tf_keras's optimizers."""
    return KINDS[request.param]


class Weight(tf_keras.layers.Layer):
    """One weight, the gradient of which is noted on its way back; in float16."""

    def build(self, shape):
        del shape
        self.weight = self.add_weight("weight", (), "float32", "ones")
        self.seen = tf.Variable(0.0, trainable=False)

    def call(self, inputs):
        @tf.custom_gradient
        def note(weight):
            def backward(upstream):
                self.seen.assign(tf.cast(upstream, tf.float32))
                return upstream

            return tf.identity(weight), backward

        return inputs * tf.cast(note(self.weight), inputs.dtype)


def fit(optimizer, factor, *, policy="float32", **keywords):
    """Train a model of one weight for a step; its gradient is a factor."""
    layer = Weight(dtype=policy, autocast=False)
    inputs = tf_keras.Input((), dtype="float16")
    model = tf_keras.Model(inputs, layer(inputs))
    model.compile(optimizer, loss=lambda _, y: tf.cast(y, tf.float32), **keywords)
    model.fit(
        np.full(2, factor, "float16"), np.zeros(2), batch_size=2, epochs=1, verbose=0
    )
    return model, layer


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("scale", [128, "dynamic"])
def test_fit_scales_the_loss(optimizers, scale, policy):
    optimizer = ls.LossScaleOptimizer(optimizers.SGD(0.5), scale)
    first = value(optimizer.get_scaled_loss(1.0))
    model, layer = fit(optimizer, 1.0, policy=tf_keras.mixed_precision.Policy(policy))
    assert model.optimizer is optimizer
    assert first == value(layer.seen)
    assert 0.5 == value(layer.weight)
    assert 1 == value(optimizer.iterations)


def test_fit_moves_weights_by_gradients_that_float16_has_not(optimizers):
    # float16 has no number between 0 and 2**-24; the gradient of a half is 2**-27.
    gradient = 2.0**-24

    class Tiny(Weight):
        def call(self, inputs):
            half = super().call(inputs)
            return tf.cast(half, tf.float32) * gradient

    def train(scale):
        optimizer = ls.LossScaleOptimizer(optimizers.SGD(2.0**24), scale)
        layer = Tiny(autocast=False)
        inputs = tf_keras.Input((), dtype="float16")
        model = tf_keras.Model(inputs, layer(inputs))
        model.compile(optimizer, loss=lambda _, y: y * 0.125)
        model.fit(np.ones(2, "float16"), np.zeros(2), batch_size=2, verbose=0)
        return value(layer.weight)

    assert (1.0, 0.875) == (train(1), train(128))


def test_fit_skips_a_step_that_overflows(optimizers):
    optimizer = ls.LossScaleOptimizer(optimizers.SGD(0.5), ls.DynamicLossScale(8.0))
    _, layer = fit(optimizer, np.inf)
    assert (1.0, 4.0) == (value(layer.weight), value(optimizer.loss_scale()))


def test_fit_refuses_an_optimizer_of_tensorflow_1():
    descent = v1.train.GradientDescentOptimizer(0.5)
    optimizer = ls.LossScaleOptimizer(descent, 128)
    with pytest.raises(SettingError, match=r"tf_keras\.optimizers"):
        fit(optimizer, 1.0, run_eagerly=True)


def test_a_graph_of_tensorflow_1_trains_an_optimizer_of_tensorflow_1():
    with tf.Graph().as_default(), v1.Session() as session:
        descent = v1.train.GradientDescentOptimizer(0.5)
        _, layer = fit(ls.LossScaleOptimizer(descent, 128), 1.0)
        assert 0.5 == session.run(layer.weight)


def test_keras_3_names_the_class_that_its_compile_takes():
    keras = pytest.importorskip("keras", reason="Keras 3 is not installed")
    optimizer = ls.LossScaleOptimizer(keras.optimizers.SGD(0.5), 128)
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"lossscale\.keras\.LossScaleOptimizer"):
        model.compile(optimizer, loss="mse")


def test_a_user_subclass_scales_the_loss_too(optimizers):
    class Mine(ls.LossScaleOptimizer):
        def __init__(self, opt):
            super().__init__(opt, 128)

    optimizer = Mine(optimizers.SGD(0.5))
    _, layer = fit(optimizer, 1.0)
    assert 128.0 == value(layer.seen)
    assert isinstance(optimizer, Mine)
    assert isinstance(optimizer, ls.LossScaleOptimizer)


def test_iterations_of_a_legacy_optimizer_can_be_set():
    descent = tf_keras.optimizers.legacy.SGD(0.5)
    optimizer = ls.LossScaleOptimizer(descent, loss_scale=128)
    optimizer.iterations = 7
    assert (7, 7) == (optimizer.iterations, descent.iterations)


def test_get_gradients_scales_and_unscales():
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("weight", initializer=2.0)
        optimizer = ls.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(1.0), 8)
        gradients = optimizer.get_gradients(weight * 3.0, [weight])
        session.run(v1.global_variables_initializer())
        assert [3.0] == session.run(gradients)


def test_weights_are_those_of_the_wrapped_optimizer():
    weight = tf.Variable(1.0)
    optimizer = ls.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(1.0), "dynamic")
    optimizer.minimize(lambda: weight * 2.0, [weight])
    assert [1] == [value(each) for each in optimizer.weights]
    assert [1] == optimizer.get_weights()
    optimizer.set_weights([np.array(5)])
    assert 5 == value(optimizer.iterations)


@pytest.mark.parametrize("name", ["lr", "learning_rate", "beta_1", "clipnorm"])
def test_settings_pass_through_the_wrapper(optimizers, name):
    adam = optimizers.Adam(0.5, beta_1=0.5, clipnorm=0.5)
    optimizer = ls.LossScaleOptimizer(adam, 8)
    assert 0.5 == value(getattr(optimizer, name))
    setattr(optimizer, name, 0.25)
    assert 0.25 == value(getattr(adam, name))
    assert 0.25 == value(getattr(optimizer, name))


def test_what_is_no_setting_is_set_on_the_wrapped_optimizer(optimizers):
    optimizer = ls.LossScaleOptimizer(optimizers.SGD(0.5), 8)
    with pytest.raises(AttributeError, match=r"inner_optimizer\.nesterov"):
        optimizer.nesterov = True
    with pytest.raises(AttributeError, match="nesterov"):
        _ = optimizer.nesterov


@pytest.mark.parametrize("way", ["config", "tf_keras"])
@pytest.mark.parametrize(
    "scale",
    [128, ls.DynamicLossScale(8.0, 3, 4.0), ls.DynamicLossScale(8.0, floor=0.5)],
)
def test_a_config_makes_the_same_optimizer(optimizers, scale, way):
    optimizer = ls.LossScaleOptimizer(
        optimizers.SGD(0.5, momentum=0.25), scale, count_skipped_steps=True
    )
    if way == "config":
        made = ls.LossScaleOptimizer.from_config(optimizer.get_config())
    else:
        serialized = tf_keras.optimizers.serialize(optimizer)
        made = tf_keras.optimizers.deserialize(serialized)
    assert isinstance(made, ls.LossScaleOptimizer)
    assert type(optimizer.inner_optimizer) is type(made.inner_optimizer)
    assert 0.25 == value(made.inner_optimizer.momentum)
    assert optimizer.get_config() == made.get_config()


def test_a_config_of_tf_keras_2_3_is_read():
    config = {
        "optimizer": {"class_name": "SGD", "config": {"learning_rate": 2.0}},
        "loss_scale": {
            "class_name": "DynamicLossScale",
            "config": {
                "initial_loss_scale": 2.0,
                "increment_period": 3,
                "multiplier": 4.0,
            },
        },
    }
    made = ls.LossScaleOptimizer.from_config(config)
    assert 2.0 == value(made.learning_rate)
    assert (2.0, 3, 4.0) == tuple(made.loss_scale.get_config().values())


def test_a_manager_and_tensorflow_1_have_no_config():
    manager = ls.FixedLossScaleManager(8)
    optimizer = ls.LossScaleOptimizer(tf_keras.optimizers.SGD(), manager)
    with pytest.raises(SettingTypeError, match="FixedLossScaleManager"):
        optimizer.get_config()
    descent = v1.train.GradientDescentOptimizer(0.5)
    with pytest.raises(SettingTypeError, match="GradientDescentOptimizer"):
        ls.LossScaleOptimizer(descent, 8).get_config()


def test_a_custom_loss_scale_comes_back_by_custom_objects(optimizers):
    class Mine(ls.FixedLossScale):
        pass

    optimizer = ls.LossScaleOptimizer(optimizers.SGD(), Mine(8))
    config = optimizer.get_config()
    made = ls.LossScaleOptimizer.from_config(config, custom_objects={"Mine": Mine})
    assert isinstance(made.loss_scale, Mine)
    with pytest.raises(SettingError, match="custom_objects"):
        ls.LossScaleOptimizer.from_config(config)


@pytest.mark.parametrize("wrapped", [(False, True), (True, False), (True, True)])
def test_checkpoints_of_a_bare_and_a_wrapped_optimizer_are_exchanged(
    optimizers, wrapped, tmp_path
):
    def train(*, wrap, path=None):
        weight = tf.Variable([1.0])
        optimizer = optimizers.SGD(0.5, momentum=0.5)
        if wrap:
            scale = ls.DynamicLossScale(8.0, increment_period=10)
            optimizer = ls.LossScaleOptimizer(optimizer, scale)
        checkpoint = tf.train.Checkpoint(weight=weight, optimizer=optimizer)
        if path:
            status = checkpoint.restore(path)
            # A bare optimizer has saved no loss scale.
            check = "existing_objects_matched" if save_wrapped else "nontrivial_match"
            getattr(status, f"assert_{check}")()
        optimizer.minimize(lambda: weight * 2.0, [weight])
        return value(weight), checkpoint, optimizer

    save_wrapped, load_wrapped = wrapped
    _, checkpoint, _ = train(wrap=save_wrapped)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    twice, _, optimizer = train(wrap=load_wrapped, path=path)
    assert [-1.5] == twice  # 1 - 1 - (1 + 0.5)
    assert 2 == value(optimizer.iterations)
    if load_wrapped:
        assert (2 if save_wrapped else 1) == value(optimizer.loss_scale.good_steps)


@pytest.mark.parametrize(("kind", "suffix"), [("new", "keras"), ("legacy", "h5")])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_an_optimizer_of_tf_keras_is_saved_with_its_model(kind, suffix, tmp_path):
    optimizers = KINDS[kind]
    optimizer = ls.LossScaleOptimizer(optimizers.SGD(0.5, momentum=0.5), 128)
    inputs = tf_keras.Input((2,))
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(inputs))
    model.compile(optimizer, loss="mse")
    model.fit(np.ones((2, 2)), np.ones(2), verbose=0)
    path = str(tmp_path / f"model.{suffix}")
    model.save(path)
    loaded = tf_keras.models.load_model(path)
    assert isinstance(loaded.optimizer, ls.LossScaleOptimizer)
    assert 1 == value(loaded.optimizer.iterations)


DROP_INS = {
    "theirs": tf_keras.mixed_precision.LossScaleOptimizer,
    "ours": drop_in.BaseLossScaleOptimizer,
}


@pytest.mark.parametrize("settings", [(True, 8.0, 2), (False, 4.0)])
def test_the_drop_in_takes_the_steps_of_tf_keras_s_own_class(optimizers, settings):
    seen = {}
    for name, cls in DROP_INS.items():
        weight = tf.Variable(1.0)
        optimizer = cls(optimizers.SGD(0.5), *settings)
        seen[name] = [optimizer.initial_scale, optimizer.dynamic_growth_steps]
        for gradient in (1.0, 2.0, 1.0):
            optimizer.get_scaled_loss(tf.constant(1.0))
            (unscaled,) = optimizer.get_unscaled_gradients([tf.constant(gradient)])
            optimizer.apply_gradients([(unscaled, weight)])
            counter = optimizer.dynamic_counter
            numbers = weight, optimizer.loss_scale, optimizer.iterations
            seen[name] += [*map(value, numbers), counter and value(counter)]
    assert seen["theirs"] == seen["ours"]


@pytest.mark.parametrize("settings", [(1,), (False,), (False, 8.0, 2)])
def test_the_drop_in_refuses_arguments_as_tf_keras_s_own_class_does(
    optimizers, settings
):
    errors = []
    for cls in DROP_INS.values():
        with pytest.raises((TypeError, ValueError)) as raised:
            cls(optimizers.SGD(), *settings)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


def test_the_drop_in_refuses_a_fixed_scale_of_0(optimizers):
    with pytest.raises(SettingError, match="1 or more, got 0"):
        drop_in.BaseLossScaleOptimizer(optimizers.SGD(), False, 0)
