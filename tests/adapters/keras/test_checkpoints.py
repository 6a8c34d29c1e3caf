"""Configs and files: ours, and those of Keras's own class."""

import copy
import dataclasses
import json

import numpy as np
import pytest
from helpers.keras_backend import QUIET, keras, numpy, only_on
from helpers.keras_steps import Steps

from lossscale import Dynamic, Fixed, ScaleState
from lossscale.errors import SettingTypeError, StateError
from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

Original = keras.optimizers.LossScaleOptimizer
ROWS = np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)
POLICY = Dynamic(init_scale=2.0**10, growth_interval=3, hysteresis=2)


def model_with(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def trained(optimizer):
    model = model_with(optimizer)
    model.fit(ROWS, ROWS[:, :2], batch_size=4, epochs=2, verbose=0)
    return model


def values(optimizer):
    return [numpy(each).tolist() for each in optimizer.variables]


def test_without_a_policy_the_config_has_the_four_keys_of_keras():
    inner = keras.optimizers.SGD(0.5)
    expected = Original(inner, 3.0, 2, name="mine").get_config()
    config = LossScaleOptimizer(inner, 3.0, 2, name="mine").get_config()
    # Before 3.12 Keras wrote settings that the class does not have.
    assert config == {key: expected[key] for key in config}
    assert 4 == len(config)


@pytest.mark.parametrize("policy", [POLICY, Fixed(8.0)], ids=["dynamic", "fixed"])
def test_a_config_brings_the_policy_back(policy):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=policy)
    config = json.loads(json.dumps(optimizer.get_config()))
    assert 5 == len(config)
    again = LossScaleOptimizer.from_config(config)
    assert policy == again.policy
    assert config == again.get_config()


def test_a_config_is_left_as_it_was():
    for policy in (None, POLICY):
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=policy)
        config = optimizer.get_config()
        before = copy.deepcopy(config)
        LossScaleOptimizer.from_config(config)
        assert before == config
    theirs = Original(keras.optimizers.SGD(0.5)).get_config()
    Original.from_config(theirs)
    assert "inner_optimizer" not in theirs  # what Keras does


def test_a_config_of_keras_own_class_loads():
    inner = keras.optimizers.SGD(0.25, momentum=0.5, nesterov=True, weight_decay=0.004)
    config = Original(inner, 3.0, 2, name="theirs").get_config()
    again = LossScaleOptimizer.from_config(config)
    assert (3.0, 2, "theirs") == (
        again.initial_scale,
        again.dynamic_growth_steps,
        again.name,
    )
    assert inner.get_config() == again.inner_optimizer.get_config()


def test_a_config_of_an_older_keras_loads():
    config = Original(keras.optimizers.SGD(0.5), 3.0, 2).get_config()
    config |= {
        "weight_decay": None,
        "clipnorm": None,
        "global_clipnorm": None,
        "clipvalue": None,
        "use_ema": False,
        "ema_momentum": 0.99,
        "ema_overwrite_frequency": None,
        "loss_scale_factor": None,
        "gradient_accumulation_steps": None,
        "dynamic": True,
    }
    assert 3.0 == LossScaleOptimizer.from_config(config).initial_scale


def test_a_malformed_policy_in_a_config_is_one_error():
    config = LossScaleOptimizer(keras.optimizers.SGD(), policy=POLICY).get_config()
    config["policy"] = {"format": "lossscale/9"}
    with pytest.raises(StateError, match="pip install --upgrade lossscale"):
        LossScaleOptimizer.from_config(config)


def test_keras_serializes_the_class_by_its_registered_name():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=POLICY)
    config = keras.optimizers.serialize(optimizer)
    assert "lossscale>LossScaleOptimizer" == config["registered_name"]
    again = keras.optimizers.deserialize(config)
    assert LossScaleOptimizer is type(again)
    assert POLICY == again.policy


@dataclasses.dataclass(frozen=True)
class Steady:
    """A policy of one's own that Keras does not know."""

    scale: float = 16.0

    def init(self):
        return ScaleState(self.scale, 0, 0)

    def step(self, state, signal, *, where):
        return state


@keras.saving.register_keras_serializable(package="tests")
@dataclasses.dataclass(frozen=True)
class Registered(Steady):
    """A policy of one's own that Keras can write."""

    def get_config(self):
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def test_a_policy_of_ones_own_is_written_if_keras_knows_it():
    policy = Registered(32.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=policy)
    config = json.loads(json.dumps(optimizer.get_config()))
    assert policy == LossScaleOptimizer.from_config(config).policy


def test_a_policy_that_keras_does_not_know_is_an_error_that_says_what_to_do():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=Steady())
    with pytest.raises(SettingTypeError, match="register_keras_serializable"):
        optimizer.get_config()


@pytest.mark.parametrize("policy", [None, POLICY], ids=["keras", "policy"])
def test_a_model_file_brings_everything_back(tmp_path, policy):
    model = trained(LossScaleOptimizer(keras.optimizers.Adam(0.01), policy=policy))
    model.optimizer.bad_steps.assign(1)
    model.optimizer.skipped_steps.assign(17)
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert LossScaleOptimizer is type(again.optimizer)
    assert model.optimizer.policy == again.optimizer.policy
    assert values(model.optimizer) == values(again.optimizer)
    for each in (model, again):
        each.fit(ROWS, ROWS[:, :2], batch_size=4, verbose=0, shuffle=False)
    assert values(model.optimizer) == values(again.optimizer)
    assert 8 + 4 == numpy(again.optimizer.iterations)


def test_a_model_file_of_keras_own_class_is_taken_over(tmp_path):
    model = trained(Original(keras.optimizers.Adam(0.01), 2.0**10, 3))
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert Original is type(again.optimizer)
    taken = LossScaleOptimizer.from_keras(again.optimizer)
    again.compile(taken, "mse")
    assert 2.0**12 == numpy(taken.dynamic_scale)
    assert 2 == numpy(taken.step_counter)
    assert 8 == numpy(taken.iterations)
    for each in (model, again):
        each.fit(ROWS, ROWS[:, :2], batch_size=4, verbose=0, shuffle=False)
    expected, actual = values(model.optimizer), values(again.optimizer)
    assert expected == actual[:4] + actual[9:]


def test_variables_of_keras_own_class_load_into_this_one():
    theirs = trained(Original(keras.optimizers.Adam(0.01), 2.0**10, 3))
    ours = trained(LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**4, 3))
    store = {}
    theirs.optimizer.save_own_variables(store)
    ours.optimizer.skipped_steps.assign(5)
    ours.optimizer.load_own_variables(store)
    expected, actual = values(theirs.optimizer), values(ours.optimizer)
    assert expected == actual[:4] + actual[9:]
    assert 2.0**12 == numpy(ours.optimizer.dynamic_scale)
    # Variables that Keras's file does not have start over.
    report = ours.optimizer.last_step
    assert (0, 0, 0) == (
        report.bad_steps,
        report.skipped_steps,
        report.consecutive_skips,
    )


@pytest.mark.parametrize("make", [Original, LossScaleOptimizer])
def test_a_weights_file_brings_the_optimizer_back(tmp_path, make):
    model = trained(make(keras.optimizers.Adam(0.01), 2.0**10, 3))
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    again = model_with(LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**4, 3))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    assert (2.0**12, 2) == (
        numpy(again.optimizer.dynamic_scale),
        numpy(again.optimizer.step_counter),
    )
    for each in (model, again):
        each.fit(ROWS, ROWS[:, :2], batch_size=4, verbose=0, shuffle=False)
    for want, have in zip(model.weights, again.weights, strict=True):
        assert numpy(want).tolist() == numpy(have).tolist()
    moments = [each.optimizer.inner_optimizer for each in (model, again)]
    assert values(moments[0]) == values(moments[1])


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_variables_of_another_optimizer_are_not_taken_for_ones_of_keras():
    # As many values as Keras's class around SGD would have, of other shapes.
    first = Steps(LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0), np.ones(3))
    store = {str(n): np.ones(3, np.float32) for n in range(6)}
    before = values(first.optimizer)
    first.optimizer.load_own_variables(store)
    assert before == values(first.optimizer)


def test_a_wrong_number_of_variables_is_keras_warning_and_changes_nothing():
    first = Steps(LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0), np.ones(3))
    before = values(first.optimizer)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        first.optimizer.load_own_variables({"0": np.float32(1.0)})
    assert before == values(first.optimizer)


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
def test_a_scale_that_keras_ran_into_starts_over_with_a_warning(scale):
    theirs = Steps(Original(keras.optimizers.SGD(0.5)), np.ones(3))
    theirs.restart(scale)
    store = {}
    theirs.optimizer.save_own_variables(store)
    ours = Steps(LossScaleOptimizer(keras.optimizers.SGD(0.5)), np.ones(3))
    with pytest.warns(UserWarning, match="The loaded loss scale starts over"):
        ours.optimizer.load_own_variables(store)
    assert 2.0**15 == ours.scale()
    with pytest.warns(UserWarning, match="The loaded loss scale starts over"):
        taken = LossScaleOptimizer.from_keras(theirs.optimizer)
    assert 2.0**15 == numpy(taken.dynamic_scale)


def test_a_fixed_scale_stays_fixed_when_variables_are_loaded():
    first = Steps(LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0), np.ones(3))
    store = {}
    first.optimizer.save_own_variables(store)
    fixed = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=Fixed(4.0))
    fixed.build(first.variables)
    with pytest.warns(UserWarning, match=r"fixed at 4\.0"):
        fixed.load_own_variables(store)
    assert 4.0 == numpy(fixed.dynamic_scale)


def test_an_optimizer_of_ours_is_taken_over_with_its_policy_and_counters():
    steps = Steps(LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=POLICY), [1.0])
    for gradient in (1.0, np.inf, 1.0):
        steps.step(np.array([gradient], np.float32))
    taken = LossScaleOptimizer.from_keras(steps.optimizer)
    assert POLICY == taken.policy
    assert values(steps.optimizer) == values(taken)
    assert steps.optimizer.inner_optimizer is taken.inner_optimizer


def test_an_optimizer_that_is_not_built_is_taken_over_too():
    theirs = Original(keras.optimizers.SGD(0.5), 3.0, 2)
    taken = LossScaleOptimizer.from_keras(theirs)
    assert (3.0, 2) == (taken.initial_scale, taken.dynamic_growth_steps)
    taken = LossScaleOptimizer.from_keras(theirs, policy=Fixed(4.0))
    assert Fixed(4.0) == taken.policy


def test_what_scales_no_loss_cannot_be_taken_over():
    with pytest.raises(SettingTypeError, match=r"LossScaleOptimizer\(optimizer\)"):
        LossScaleOptimizer.from_keras(keras.optimizers.SGD())


@only_on("tensorflow")
def test_a_checkpoint_of_tensorflow_brings_everything_back(tmp_path):
    import tensorflow as tf

    def steps():
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1), policy=POLICY)
        return Steps(optimizer, np.ones(3))

    first, second = steps(), steps()
    for value in (1.0, np.inf, 1.0):
        first.step(np.full(3, value, np.float32))
    saved = tf.train.Checkpoint(optimizer=first.optimizer)
    path = saved.save(str(tmp_path / "checkpoint"))
    restored = tf.train.Checkpoint(optimizer=second.optimizer)
    restored.restore(path).assert_existing_objects_matched()
    assert values(first.optimizer) == values(second.optimizer)
    assert 1 == numpy(second.optimizer.skipped_steps)


@only_on("tensorflow")
def test_a_checkpoint_of_keras_own_class_loads_into_this_one(tmp_path):
    import tensorflow as tf

    theirs = Steps(Original(keras.optimizers.Adam(0.1), 64.0), np.ones(3))
    ours = Steps(LossScaleOptimizer(keras.optimizers.Adam(0.1), 64.0), np.ones(3))
    for value in (1.0, np.inf, 1.0):
        theirs.step(np.full(3, value, np.float32))
    path = tf.train.Checkpoint(optimizer=theirs.optimizer).save(str(tmp_path / "c"))
    tf.train.Checkpoint(optimizer=ours.optimizer).restore(path).expect_partial()
    assert (32.0, 1) == (ours.scale(), ours.good())
    assert 2 == ours.iterations()
