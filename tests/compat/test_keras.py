"""Keras 3's optimizer compared with its preset, and the rule on keras.ops.

Runs once for each backend: KERAS_BACKEND is chosen before Keras is imported.
"""

import os
import random

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="keras is not installed")
if "KERAS_BACKEND" not in os.environ:
    pytest.skip(
        "KERAS_BACKEND is not set: the test runner sets it to each backend in turn",
        allow_module_level=True,
    )

from helpers.rules import run_rule  # noqa: E402
from helpers.sequences import draw, overflow_pattern  # noqa: E402
from helpers.traces import check_equal_while, replay  # noqa: E402

from lossscale import ScaleState, presets  # noqa: E402
from lossscale.convert import from_library, to_library  # noqa: E402
from lossscale.core.validation import SMALLEST_NORMAL  # noqa: E402

BACKEND = keras.backend.backend()

# Keras 3.15 converts its variables in a way that NumPy 2.4 announces to end.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def test_the_rule_runs_on_keras_ops():
    def array(value, dtype):
        kind = "bool" if dtype is None else str(dtype).rpartition(".")[2]
        return keras.ops.convert_to_tensor(value, kind)

    names = ("float32", "int32")
    zero = [keras.ops.convert_to_tensor(0, name) for name in names]
    kinds = tuple(value.dtype for value in zero)
    short = dict(zip(kinds, names, strict=True))
    run_rule(
        array=lambda value, dtype: array(value, short.get(dtype, dtype)),
        dtypes=kinds,
        where=keras.ops.where,
    )


class Original:
    """Keras's optimizer around plain descent, stepped with given gradients."""

    def __init__(self, init_scale, growth_interval):
        self.optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0),
            initial_scale=init_scale,
            dynamic_growth_steps=growth_interval,
        )
        self.variable = keras.Variable([0.0])
        self.optimizer.build([self.variable])
        self.good = keras.ops.convert_to_tensor([1.0])
        self.bad = keras.ops.convert_to_tensor([np.nan])
        if BACKEND == "tensorflow":
            import tensorflow as tf

            self.applied = tf.function(
                lambda grad: self.optimizer.apply([grad], [self.variable]),
                autograph=False,
            )
        if BACKEND == "jax":  # stateful apply traces both branches there
            import jax

            self.jitted = jax.jit(
                lambda variables, grad, weights: self.optimizer.stateless_apply(
                    variables, [grad], weights
                )
            )

    def step(self, finite):
        gradient = self.good if finite else self.bad
        if BACKEND == "tensorflow":
            self.applied(gradient)
            return
        if BACKEND == "torch":
            self.optimizer.apply([gradient], [self.variable])
            return
        weights, variables = self.jitted(
            [v.value for v in self.optimizer.variables], gradient, [self.variable.value]
        )
        self.variable.assign(weights[0])
        for variable, value in zip(self.optimizer.variables, variables, strict=True):
            variable.assign(value)

    def state(self):
        variables = (self.optimizer.dynamic_scale, self.optimizer.step_counter)
        return tuple(keras.ops.convert_to_numpy(v.value).item() for v in variables)

    def restart(self, scale):
        self.optimizer.dynamic_scale.assign(scale)
        self.optimizer.step_counter.assign(0)


def test_the_preset_takes_keras_steps():
    """More than a thousand sequences on the three backends together.

    The preset is the same on each, and so are Keras's numbers.
    """
    rng = random.Random(f"5 {BACKEND}")
    originals = {n: Original(1.0, n) for n in (1, 2, 3, 5)}
    for _ in range(340):
        config = draw(
            rng,
            init_scale=(1.0, 3.0, 7.3, 2.0**15, 1e-30, 2.0**125),
            growth_interval=tuple(originals),
        )
        flags = overflow_pattern(rng, 10)
        original = originals[config["growth_interval"]]
        original.restart(config["init_scale"])
        expected = []
        for flag in flags:
            original.step(flag)
            expected.append(original.state())
        states = replay(presets.get("keras", **config), flags)
        check_equal_while(
            expected,
            [(state.scale, state.good_steps) for state in states],
            lambda pair: SMALLEST_NORMAL <= pair[0] < np.inf,
            config,
        )


def test_the_defaults_are_those_of_keras():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    policy = presets.get("keras")
    config = optimizer.get_config()
    assert policy.init_scale == config["initial_scale"]
    assert policy.growth_interval == config["dynamic_growth_steps"]


def test_keras_applies_a_gradient_that_overflows_by_unscaling():
    original = Original(0.25, 1000)
    original.good = keras.ops.convert_to_tensor([3e38])
    original.step(True)
    assert not np.isfinite(keras.ops.convert_to_numpy(original.variable.value)).all()


def test_the_variables_of_keras_are_read_and_written():
    original = Original(8.0, 3)
    for flag in (True, True, False, True):
        original.step(flag)
    scale, counter = original.state()
    values = original.optimizer.get_config()
    values |= {"dynamic_scale": scale, "step_counter": counter}
    policy, state = from_library("keras", values)
    assert ScaleState(4.0, 1, 0) == state
    assert presets.get("keras", init_scale=8.0, growth_interval=3) == policy
    written = to_library("keras", policy, state)
    assert () == written.dropped
    other = Original(1.0, written.values["dynamic_growth_steps"])
    other.optimizer.dynamic_scale.assign(written.values["dynamic_scale"])
    other.optimizer.step_counter.assign(written.values["step_counter"])
    flags = [True, True, False, False]
    for flag, expected in zip(flags, replay(policy, flags, state), strict=True):
        other.step(flag)
        assert (expected.scale, expected.good_steps) == other.state()
