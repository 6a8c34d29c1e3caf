"""Policies as the loss scale of the classic optimizer wrapper."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

from conformance import STARTS, magnitude_trace  # noqa: E402

import lossscale.numpy as reference  # noqa: E402
import lossscale.tensorflow as ls  # noqa: E402
from lossscale import (  # noqa: E402
    AutoStart,
    Dynamic,
    Headroom,
    LogMax,
    OverflowRate,
    Signal,
)
from lossscale.errors import SettingError, SettingTypeError  # noqa: E402

POLICIES = [
    Dynamic(growth_interval=2),
    Headroom(Dynamic(growth_interval=7), window=6),
    LogMax(window=5, patience=2),
    OverflowRate(tolerance=0.1),
    AutoStart(),
]


class Loop:
    """One weight under plain descent; the gradient is what a step says."""

    def __init__(self, policy, **options):
        self.weight = tf.Variable([1.0])
        descent = tf.compat.v1.train.GradientDescentOptimizer(0.0)
        self.optimizer = ls.LossScaleOptimizer(descent, policy, **options)
        self.scale = self.optimizer.loss_scale

    def step(self, gradient):
        """Take a step whose unscaled gradient is known."""
        return self.optimizer.apply_gradients([(gradient, self.weight)])

    def numbers(self):
        return [float(value) for value in self.scale.state]


def compiled(loop, how):
    if how == "eager":
        return loop.step
    return tf.function(loop.step, jit_compile=how == "XLA", autograph=False)


@pytest.mark.parametrize("how", ["eager", "graph", "XLA"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_a_trace_gives_the_states_of_numpy(policy, how):
    loop = Loop(policy)
    step = compiled(loop, how)
    expected = reference.init(policy)
    steps = [*STARTS["explained"], *magnitude_trace(5, 12)]
    for finite, magnitude in steps:
        step(tf.constant([np.float32(magnitude if finite else np.inf)]))
        amax = np.float32(magnitude) * expected.scale
        expected = reference.update(policy, expected, Signal(finite, amax=amax))
        assert [float(value) for value in expected] == loop.numbers()


def test_a_skipped_step_leaves_the_weights():
    loop = Loop(AutoStart())
    loop.optimizer._optimizer._learning_rate = 1.0
    loop.step(tf.constant([np.inf]))
    assert [1.0] == loop.weight.numpy().tolist()
    assert 2.0**12 == float(loop.scale())


def test_a_checkpoint_holds_what_the_policy_remembers(tmp_path):
    first, second = (Loop(POLICIES[1]) for _ in range(2))
    for magnitude in (0.25, 2.0, 0.5):
        first.step(tf.constant([magnitude]))
    path = tf.train.Checkpoint(optimizer=first.optimizer).save(tmp_path / "state")
    restored = tf.train.Checkpoint(optimizer=second.optimizer).restore(path)
    restored.assert_consumed()
    assert first.numbers() == second.numbers()
    assert 2.0 == float(second.scale.peak)


def test_its_config_brings_the_policy_back():
    for policy in POLICIES:
        scale = ls.PolicyLossScale(policy)
        again = ls.PolicyLossScale.from_config(scale.get_config())
        assert policy == again.policy
    assert repr(again) == f"PolicyLossScale({POLICIES[-1]!r})"


def test_a_step_under_a_strategy_measures_every_replica():
    # One device: two are needed by the tests of strategies, in a process of their own.
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        loop = Loop(Headroom(Dynamic(init_scale=8.0)))
    gradient = tf.constant([4.0])
    strategy.run(lambda: loop.step(gradient))
    assert (16.0, 4.0) == (float(loop.scale()), float(loop.scale.peak))


def test_sparse_gradients_are_measured():
    loop = Loop(Headroom(Dynamic(init_scale=8.0)))
    slices = tf.IndexedSlices(tf.constant([4.0]), tf.constant([0]), tf.constant([1]))
    loop.step(slices)
    assert 4.0 == float(loop.scale.peak)


def test_a_wrapper_of_tf_keras_is_written_and_read_with_its_policy():
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    wrapped = ls.LossScaleOptimizer(tf_keras.optimizers.SGD(0.5), POLICIES[1])
    again = type(wrapped).from_config(wrapped.get_config())
    assert POLICIES[1] == again.loss_scale.policy


@pytest.mark.parametrize("wrong", [Headroom, "headroom", None])
def test_something_else_is_refused(wrong):
    with pytest.raises((SettingError, SettingTypeError)):
        Loop(wrong)
    with pytest.raises(SettingTypeError, match="policy must be a policy"):
        ls.PolicyLossScale(wrong)
