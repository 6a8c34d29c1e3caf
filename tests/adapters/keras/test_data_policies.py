"""Policies that see more than a flag: their state in variables, on each backend."""

import json

import numpy as np
import pytest
from conformance import DATA_POLICIES, STARTS, magnitude_trace
from helpers.keras_backend import QUIET, keras, numpy, only_on
from helpers.keras_steps import Steps

import lossscale.numpy as reference
from lossscale import (
    AutoStart,
    Dynamic,
    Headroom,
    OverflowRate,
    ScaleState,
    Signal,
    from_portable,
    presets,
    to_portable,
)
from lossscale.errors import SettingError
from lossscale.keras import LossScaleOptimizer, find_scale

pytestmark = QUIET

Original = keras.optimizers.LossScaleOptimizer
ROWS = np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)

REMEMBERING = [
    policy for policy in DATA_POLICIES if len(policy.init()) > len(ScaleState._fields)
][1:]  # one Headroom
every_policy = pytest.mark.parametrize(
    "policy", REMEMBERING, ids=lambda policy: type(policy).__name__
)


def state_of(optimizer):
    return [float(numpy(variable)) for variable in optimizer._state_variables()]


def run(policy, trace):
    """Yield NumPy's state and the optimizer's after every step of a trace."""
    # Plain descent with a rate of 0 takes any finite gradient.
    steps = Steps(LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy), [1.0])
    expected = reference.init(policy)
    for finite, magnitude in trace:
        amax = np.float32(min(float(magnitude) * steps.scale(), 2.0**100))
        if magnitude and magnitude < 2.0**-100:
            continue
        steps.step(np.array([amax if finite else np.inf], np.float32))
        # Divided and multiplied again by the scale: Keras checks what is unscaled.
        seen = np.float32(amax / expected.scale) * expected.scale
        expected = reference.update(policy, expected, Signal(finite, amax=seen))
        yield [float(value) for value in expected], state_of(steps.optimizer)


@pytest.mark.parametrize(
    "policy",
    [REMEMBERING[0], OverflowRate(tolerance=0.1)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_trace_gives_the_states_of_numpy(policy):
    for expected, state in run(policy, magnitude_trace(5, 25)):
        assert expected == state


@pytest.mark.parametrize("name", ["explained", "inside the network"])
def test_a_start_gives_the_states_of_numpy(name):
    for expected, state in run(AutoStart(), STARTS[name]):
        assert expected == state


def model_with(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def fit(optimizer, epochs=2):
    model = model_with(optimizer)
    model.fit(ROWS, ROWS[:, :2], 4, epochs, verbose=0, shuffle=False)
    return model


def headroom():
    policy = Headroom(Dynamic(init_scale=8.0), window=5)
    return LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=policy)


def test_fit_measures_what_the_policy_reads():
    model = fit(headroom())
    scale, *_, peak, last_peak, age = state_of(model.optimizer)
    assert scale > 8.0
    assert max(peak, last_peak) > 0.0
    assert 8 % 5 == age


def test_a_policy_that_reads_flags_alone_has_no_variable_and_measures_nothing():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=Dynamic())
    optimizer.build([keras.Variable([1.0])])
    assert [] == optimizer._memory
    assert not optimizer._measures_amax


@every_policy
def test_a_config_brings_the_policy_back(policy):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=policy)
    config = json.loads(json.dumps(optimizer.get_config()))
    assert policy == LossScaleOptimizer.from_config(config).policy


def test_a_saved_model_continues_with_what_the_policy_remembers(tmp_path):
    whole = fit(headroom(), epochs=4)
    model = fit(headroom())
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert state_of(model.optimizer) == state_of(again.optimizer)
    assert model.optimizer.policy == again.optimizer.policy
    again.fit(ROWS, ROWS[:, :2], 4, 2, verbose=0, shuffle=False)
    assert state_of(whole.optimizer) == state_of(again.optimizer)


@pytest.mark.parametrize("own", [True, False], ids=["a policy of flags", "keras"])
def test_a_file_without_a_memory_starts_it_anew(own, tmp_path):
    inner = keras.optimizers.SGD(0.01)
    if own:
        optimizer = LossScaleOptimizer(inner, policy=Dynamic(init_scale=32.0))
    else:
        optimizer = Original(inner, initial_scale=32.0)
    saved = fit(optimizer)
    saved.save_weights(tmp_path / "saved.weights.h5")
    model = fit(headroom())
    model.load_weights(tmp_path / "saved.weights.h5")
    assert [32.0, 8.0, 0.0, 0.0, 0.0, 0.0] == state_of(model.optimizer)
    assert 8 == int(numpy(model.optimizer.iterations))


def test_an_optimizer_is_converted_with_its_memory():
    model = fit(headroom())
    converted = LossScaleOptimizer.from_keras(model.optimizer)
    assert state_of(model.optimizer) == state_of(converted)
    policy = AutoStart()
    other = LossScaleOptimizer.from_keras(model.optimizer, policy=policy)
    assert [policy.rule.init_scale] == state_of(other)[3:]


def test_unscaled_gradients_leave_the_decision_to_the_rule():
    optimizer = headroom()
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    for _ in range(3):
        gradient = keras.ops.convert_to_tensor([0.5])
        unscaled = optimizer.get_unscaled_gradients([gradient])
        optimizer.apply(unscaled, [variable])
    assert [8.0, 3.0, 0.0, 0.0, 0.0, 0.0] == state_of(optimizer)


@only_on("tensorflow")
def test_the_largest_gradient_of_all_replicas_counts():
    import tensorflow as tf

    # Not by collectives: those of two strategies in a process meet each other.
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        optimizer = headroom()
        variable = keras.Variable([1.0])
        optimizer.build([variable])
    gradients = tf.constant([16.0, 64.0])

    def step():
        place = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = tf.gather(gradients, place) * tf.ones_like(variable.value)
        optimizer.apply([gradient], [variable])

    tf.function(lambda: strategy.run(step))()
    peaks = strategy.experimental_local_results(optimizer._memory[0].value)
    assert [8.0, 8.0] == [float(peak) for peak in peaks]


@only_on("tensorflow")
@pytest.mark.parametrize("policy", [Headroom(), AutoStart()], ids=["Headroom", "start"])
def test_a_step_that_xla_compiles_has_the_same_states(policy):
    import tensorflow as tf

    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    step = tf.function(lambda x: optimizer.apply([x], [variable]), jit_compile=True)
    expected = reference.init(policy)
    for finite, amax in ((False, 1.0), (True, 0.0), (True, 3000.0), (True, 2.0)):
        gradient = tf.constant([amax if finite else np.inf])
        step(gradient)
        signal = Signal(finite, amax=np.float32(amax))
        expected = reference.update(policy, expected, signal)
        assert [float(value) for value in expected] == state_of(optimizer)


def test_the_first_scale_is_found_before_fit_and_nothing_is_lost():
    # The gradient, 1e28, is beyond float32 where 2**40 scales it.
    policy = AutoStart(Dynamic(init_scale=2.0**40))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1e-30), policy=policy)
    model = model_with(optimizer)
    rows = np.full((4, 3), 1e10, np.float32), np.full((4, 2), 1e18, np.float32)
    before = [numpy(weight).tolist() for weight in model.weights]
    assert find_scale(model, *rows) < 2.0**30
    assert 1 == int(numpy(model.optimizer.iterations))
    assert 0 < int(model.optimizer.last_step.skipped_steps) <= 4
    assert before != [numpy(weight).tolist() for weight in model.weights]
    assert not bool(optimizer.policy.is_starting(model.optimizer.state))


def test_auto_is_short_for_the_policy_with_keras_interval():
    inner = keras.optimizers.SGD()
    optimizer = LossScaleOptimizer(inner, "auto", dynamic_growth_steps=5)
    expected = AutoStart(presets.get("keras", growth_interval=5))
    assert expected == optimizer.policy
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert expected == again.policy
    with pytest.raises(SettingError, match="initial_scale='auto'"):
        LossScaleOptimizer(inner, "auto", policy=expected)


def test_a_state_is_portable():
    model = fit(headroom())
    optimizer = model.optimizer
    policy, state = from_portable(to_portable(optimizer.policy, optimizer.state))
    assert optimizer.policy == policy
    assert state_of(optimizer) == [float(value) for value in state]


def test_a_model_without_a_search_is_an_error_that_says_what_to_type():
    for optimizer in (headroom(), keras.optimizers.SGD(0.1)):
        with pytest.raises(SettingError, match=r"policy=lossscale.AutoStart\(\)"):
            find_scale(model_with(optimizer), ROWS, ROWS[:, :2])


def test_a_model_that_was_not_compiled_is_an_error_that_says_so():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(SettingError, match=r"not compiled: call model\.compile\("):
        find_scale(model, ROWS, ROWS[:, :2])
