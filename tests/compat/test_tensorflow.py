"""TensorFlow's own DynamicLossScale and the preset, and the rule in every mode."""

import random

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

from helpers.rules import run_rule  # noqa: E402
from helpers.sequences import draw, overflow_pattern  # noqa: E402
from helpers.traces import replay  # noqa: E402

import lossscale.numpy as ls  # noqa: E402
from lossscale import ScaleState, presets, to_portable  # noqa: E402
from lossscale.convert import from_library, to_library  # noqa: E402


def original(config):
    return tf.compat.v1.mixed_precision.DynamicLossScale(
        config["init_scale"], config["growth_interval"], config["growth_factor"]
    )


def test_the_preset_and_our_class_take_tensorflows_steps():
    rng = random.Random(4)
    good, bad = [tf.constant(1.0)], [tf.constant(float("nan"))]
    for _ in range(1000):
        config = draw(
            rng,
            init_scale=(1.0, 3.0, 7.3, 2.0**15, 1e30, 3e38),
            growth_interval=(1, 2, 3, 5),
            growth_factor=(2.0, 1.7, 3.0, 4.0, 1.0000001),
        )
        flags = overflow_pattern(rng, rng.randint(10, 30))
        theirs = original(config)
        expected = []
        for flag in flags:
            _, should_apply = theirs.update(good if flag else bad)
            counter = int(theirs._num_good_steps.numpy())
            expected.append((float(theirs()), counter, bool(should_apply)))
        policy = presets.get(
            "tensorflow", **config, backoff_divisor=config["growth_factor"]
        )
        states = replay(policy, flags)
        assert expected == [
            (state.scale, state.good_steps, flag)
            for state, flag in zip(states, flags, strict=True)
        ], config
        ours = ls.DynamicLossScale(*config.values())
        assert expected == [
            (
                float(ours()),
                int(ours._state_variables.read().good_steps),
                bool(should_apply),
            )
            for flag in flags
            for _, should_apply in [ours.update_from_finite(flag)]
        ]


def test_the_defaults_are_tensorflows():
    config = tf.compat.v1.mixed_precision.DynamicLossScale().get_config()
    policy = presets.get("tensorflow")
    assert {
        "initial_loss_scale": policy.init_scale,
        "increment_period": policy.growth_interval,
        "multiplier": policy.growth_factor,
    } == config
    assert config == ls.DynamicLossScale().get_config()


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
def test_the_rule_runs_on_tensors(mode):
    compilers = {
        "eager": None,
        "function": tf.function,
        "xla": lambda function: tf.function(function, jit_compile=True),
    }
    run_rule(
        array=tf.constant,
        dtypes=(tf.float32, tf.int32),
        where=tf.where,
        compile_rule=compilers[mode],
    )


def test_the_rule_runs_in_a_graph_of_tensorflow_1():
    from lossscale.core.rule import transition

    policy = presets.get("tensorflow_contrib", growth_interval=2, init_scale=1000.0)
    flags = overflow_pattern(random.Random(6), 40)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        kinds = (tf.float32, tf.int32, tf.int32, tf.bool)
        inputs = [tf.compat.v1.placeholder(kind, ()) for kind in kinds]
        outputs = transition(*inputs, *policy.settings, *policy.switches, tf.where)
        state = (policy.init_scale, 0, 0)
        for flag, expected in zip(flags, replay(policy, flags), strict=True):
            feed = dict(zip(inputs, (*state, flag), strict=True))
            state = tuple(value.item() for value in session.run(outputs, feed))
            assert tuple(expected) == state


def test_checkpointed_variables_are_read_and_written():
    theirs = original({"init_scale": 8.0, "growth_interval": 3, "growth_factor": 2.0})
    for value in (1.0, 1.0, float("inf"), 1.0):
        theirs.update([tf.constant(value)])
    values = theirs.get_config() | {
        "current_loss_scale": theirs._current_loss_scale,
        "good_steps": theirs._num_good_steps,
    }
    policy, state = from_library("tensorflow", values)
    assert ScaleState(4.0, 1, 0) == state
    assert (3, 2.0) == (policy.growth_interval, policy.backoff_divisor)
    written = to_library("tensorflow", policy, state)
    assert () == written.dropped
    assert theirs.get_config() == {k: written.values[k] for k in theirs.get_config()}


def test_a_state_of_tensors_becomes_portable():
    state = ScaleState(tf.constant(8.0), tf.Variable(3), tf.constant(1))
    portable = to_portable(presets.get("tensorflow"), state)
    assert {"scale": 8.0, "good_steps": 3, "bad_steps": 1} == portable["state"]
