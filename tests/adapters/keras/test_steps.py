"""Single steps and sequences, compared with Keras's own class and with NumPy."""

import random

import numpy as np
import pytest
from helpers.keras_backend import BACKEND, QUIET, keras, numpy, only_on
from helpers.keras_steps import Steps
from helpers.sequences import draw, overflow_pattern
from helpers.traces import replay

from lossscale import Dynamic, Fixed, ScaleState, presets
from lossscale.errors import GradientError, StructureError
from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

Original = keras.optimizers.LossScaleOptimizer
START = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
GRADIENT = np.array([1.0, 6.0, 7.0, 2.0], np.float32)
BAD = np.array([np.inf, 1.0, 1.0, 1.0], np.float32)


def descent(**arguments):
    return LossScaleOptimizer(keras.optimizers.SGD(0.5), **arguments)


def test_a_finite_step_unscales_and_applies():
    steps = Steps(descent(), START)
    steps.step(GRADIENT * 2.0**15)
    assert [0.5, -1.0, -0.5, 3.0] == steps.weights()[0].tolist()
    assert 1 == steps.iterations()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_overflow_changes_nothing_but_the_scale(value):
    steps = Steps(descent(), START)
    gradient = GRADIENT.copy()
    gradient[2] = value
    steps.step(gradient)
    assert START.tolist() == steps.weights()[0].tolist()
    assert 2.0**14 == steps.scale()
    assert 0 == steps.iterations()


def test_four_overflows_take_400_to_25():
    steps = Steps(descent(initial_scale=400.0), START)
    for _ in range(4):
        steps.step(BAD)
    assert 25.0 == steps.scale()


def test_eight_clean_steps_take_2_to_32_with_an_interval_of_2():
    steps = Steps(descent(initial_scale=2.0, dynamic_growth_steps=2), START)
    for _ in range(8):
        steps.step(GRADIENT)
    assert 32.0 == steps.scale()
    assert 8 == steps.iterations()


def test_the_step_that_grows_the_scale_unscales_with_the_one_before():
    steps = Steps(descent(initial_scale=4.0, dynamic_growth_steps=1), START)
    steps.step(GRADIENT * 4.0)
    assert (START - 0.5 * GRADIENT).tolist() == steps.weights()[0].tolist()
    assert 8.0 == steps.scale()


@pytest.mark.parametrize("inner", ["SGD", "Adam"])
def test_random_sequences_are_those_of_keras_bit_for_bit(inner):
    """More than a thousand of them with both optimizers on the three backends."""
    rng = random.Random(f"3 {BACKEND}")
    numbers = np.random.default_rng(rng.randrange(2**32))
    make = {
        "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "Adam": lambda: keras.optimizers.Adam(0.01),
    }[inner]
    values = numbers.normal(size=(2, 3)), numbers.normal(size=5)
    pairs = {
        interval: (
            Steps(Original(make(), dynamic_growth_steps=interval), *values),
            Steps(LossScaleOptimizer(make(), dynamic_growth_steps=interval), *values),
        )
        for interval in (1, 2, 3, 5)
    }
    for _ in range(170):
        config = draw(
            rng,
            init_scale=(1.0, 3.0, 7.3, 2.0**15, 1e-3, 2.0**60),
            growth_interval=tuple(pairs),
        )
        pair = pairs[config["growth_interval"]]
        for steps in pair:
            steps.restart(config["init_scale"])
        for finite in overflow_pattern(rng, 6):
            gradients = [
                (numbers.normal(size=np.shape(value)) * config["init_scale"]).astype(
                    np.float32
                )
                for value in values
            ]
            if not finite:
                gradients[1][rng.randrange(5)] = rng.choice((np.inf, -np.inf, np.nan))
            for steps in pair:
                steps.step(*gradients)
            theirs, ours = (
                [
                    steps.scale(),
                    steps.good(),
                    *(each.tobytes() for each in steps.weights()),
                ]
                for steps in pair
            )
            assert theirs == ours, config


def test_every_policy_moves_the_scale_as_the_core_says():
    rng = random.Random(8)
    policies = [
        Dynamic(init_scale=64.0, growth_interval=2, hysteresis=2, max_scale=2.0**8),
        Dynamic(init_scale=9.0, growth_factor=1.7, backoff_divisor=3.0, min_scale=1.0),
        presets.get("flax", growth_interval=3),
        presets.get("deepspeed", growth_interval=3),
        presets.get("megatron", growth_interval=2),
        Fixed(8.0),
    ]
    for policy in policies:
        steps = Steps(descent(policy=policy), START)
        flags = overflow_pattern(rng, 60)
        for flag, expected in zip(flags, replay(policy, flags), strict=True):
            steps.step(GRADIENT if flag else BAD)
            state = steps.scale(), steps.good(), numpy(steps.optimizer.bad_steps).item()
            assert tuple(expected) == state, policy


def test_a_policy_of_ones_own_moves_the_scale():
    class Additive:
        def init(self):
            return ScaleState(10.0, 5, 7)

        def step(self, state, signal, *, where):
            scale = where(signal.finite, state.scale + 1.0, 10.0)
            return ScaleState(scale, where(signal.finite, 1, 2), 3)

    steps = Steps(descent(policy=Additive()), START)
    assert (10.0, 5) == (steps.scale(), steps.good())
    assert 7 == numpy(steps.optimizer.bad_steps)
    seen = []
    for gradient in (GRADIENT, GRADIENT, BAD, GRADIENT):
        steps.step(gradient)
        seen.append((steps.scale(), steps.good()))
    assert [(11.0, 1), (12.0, 1), (10.0, 2), (11.0, 1)] == seen
    assert 3 == numpy(steps.optimizer.bad_steps)


def test_the_bounds_hold_whatever_the_default_dtype_is():
    keras.config.set_floatx("float16")
    policy = Dynamic(init_scale=2.0**-125, growth_interval=1, max_scale=2.0**127)
    steps = Steps(descent(policy=policy), START)
    for _ in range(4):
        steps.step(BAD)
    assert 2.0**-126 == steps.scale()
    steps.optimizer.dynamic_scale.assign(2.0**126)
    for _ in range(4):
        steps.step(GRADIENT)
    assert 2.0**127 == steps.scale()


def test_the_variables_keep_the_names_and_dtypes_of_keras():
    ours, theirs = descent(), Original(keras.optimizers.SGD(0.5))
    for optimizer in (ours, theirs):
        optimizer.build([keras.Variable([1.0])])
    for name in ("step_counter", "dynamic_scale"):
        want, have = getattr(theirs, name), getattr(ours, name)
        assert (want.name, want.dtype) == (have.name, have.dtype)
    names = [variable.name for variable in ours.variables]
    assert [variable.name for variable in theirs.variables][:4] == names[:4]


def test_the_report_tells_the_last_step():
    policy = Dynamic(init_scale=8.0, growth_interval=2, hysteresis=2)
    steps = Steps(descent(policy=policy), START)
    expected = {
        "good": (False, 8.0, 1, 0, 0, 0),
        "grows": (False, 8.0, 0, 0, 0, 0),
        "bad": (True, 16.0, 0, 1, 1, 1),
        "backs off": (True, 16.0, 0, 0, 2, 2),
        "good again": (False, 8.0, 1, 0, 2, 0),
    }
    kept = []
    for gradient, report in zip(
        (GRADIENT, GRADIENT, BAD, BAD, GRADIENT), expected.values(), strict=True
    ):
        steps.step(gradient)
        kept.append(steps.optimizer.last_step)
        assert report == tuple(numpy(value).item() for value in kept[-1][:6])
    # What was read is a record: later steps do not change it.
    assert list(expected.values()) == [
        tuple(numpy(value).item() for value in report[:6]) for report in kept
    ]


def test_before_any_step_the_report_is_that_of_the_policy():
    optimizer = descent(initial_scale=8.0)
    assert (False, 8.0, 0, 0, 0, 0) == optimizer.last_step[:6]
    optimizer.build([keras.Variable(START)])
    report = tuple(numpy(value).item() for value in optimizer.last_step[:6])
    assert (False, 8.0, 0, 0, 0, 0) == report
    assert optimizer.last_step.reason is None


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_missing_gradient_leaves_its_variable():
    steps = Steps(descent(initial_scale=2.0), START, START)
    steps.step(GRADIENT * 2.0, None)
    assert [0.5, -1.0, -0.5, 3.0] == steps.weights()[0].tolist()
    assert START.tolist() == steps.weights()[1].tolist()


def test_no_gradient_at_all_is_keras_error_and_the_scale_stays():
    steps = Steps(descent(dynamic_growth_steps=1), START)
    with pytest.raises(ValueError, match="No gradients provided"):
        steps.step(None)
    assert 2.0**15 == steps.scale()


def test_an_empty_list_counts_as_a_finite_step_as_in_keras():
    ours, theirs = descent(), Original(keras.optimizers.SGD(0.5))
    for optimizer in (theirs, ours):
        steps = Steps(optimizer, START)
        steps.step()
        assert (1, 0) == (steps.good(), steps.iterations())


def test_too_few_gradients_are_an_error():
    steps = Steps(descent(), START, START)
    with pytest.raises(StructureError, match="1 gradients for 2 variables"):
        steps.step(GRADIENT)


def test_an_integer_gradient_is_an_error_that_names_its_variable():
    optimizer = descent()
    variable = keras.Variable(START, name="table")
    optimizer.build([variable])
    gradient = keras.ops.convert_to_tensor([1, 2, 3, 4], "int32")
    with pytest.raises(GradientError, match="The gradient of table is int32"):
        optimizer.apply([gradient], [variable])


def test_gradients_without_variables_need_a_built_optimizer():
    optimizer = descent(initial_scale=2.0)
    gradient = keras.ops.convert_to_tensor(GRADIENT * 2.0)
    with pytest.raises(ValueError, match=r"optimizer\.build"):
        optimizer.apply([gradient])
    variable = keras.Variable(START)
    optimizer.build([variable])
    optimizer.apply([gradient])
    assert [0.5, -1.0, -0.5, 3.0] == numpy(variable).tolist()


def test_stateful_apply_works_on_every_backend_outside_a_compiled_function():
    optimizer = descent(initial_scale=2.0)
    first, second = keras.Variable(START), keras.Variable(START)
    optimizer.apply([keras.ops.convert_to_tensor(GRADIENT * 2.0)] * 2, [first, second])
    optimizer.apply([keras.ops.convert_to_tensor(BAD)] * 2, [first, second])
    assert [0.5, -1.0, -0.5, 3.0] == numpy(first).tolist()
    assert numpy(first).tolist() == numpy(second).tolist()
    assert 1.0 == numpy(optimizer.dynamic_scale)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_stateful_apply_takes_some_of_the_variables_in_any_order():
    optimizer = descent(initial_scale=1.0)
    variables = [keras.Variable([float(n)]) for n in range(3)]
    optimizer.build(variables)
    gradients = [keras.ops.convert_to_tensor([float(n)]) for n in (20, 2)]
    optimizer.apply(gradients, [variables[2], variables[0]])
    assert [-1.0, 1.0, -8.0] == [numpy(each).item() for each in variables]


def test_a_variable_that_the_optimizer_does_not_know_is_keras_error():
    optimizer = descent()
    optimizer.build([keras.Variable(START)])
    gradient = keras.ops.convert_to_tensor(GRADIENT)
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([gradient], [keras.Variable(START)])


def test_variables_overwritten_by_their_gradient_are_not_unscaled():
    steps = Steps(descent(initial_scale=8.0), START, START)
    steps.variables[0].overwrite_with_gradient = True
    steps.step(GRADIENT, GRADIENT * 8.0)
    assert GRADIENT.tolist() == steps.weights()[0].tolist()
    assert [0.5, -1.0, -0.5, 3.0] == steps.weights()[1].tolist()


def test_an_infinite_value_that_would_overwrite_skips_the_step():
    steps = Steps(descent(initial_scale=8.0), START, START)
    steps.variables[0].overwrite_with_gradient = True
    steps.step(BAD, GRADIENT)
    assert [START.tolist()] * 2 == [each.tolist() for each in steps.weights()]
    assert 4.0 == steps.scale()


def test_the_scale_stays_if_the_inner_optimizer_raises():
    class Broken(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            message = "broken"
            raise RuntimeError(message)

    optimizer = LossScaleOptimizer(Broken(0.5), 8.0, 1)
    variable = keras.Variable(START)
    optimizer.build([variable])
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.apply([keras.ops.convert_to_tensor(GRADIENT)], [variable])
    assert 8.0 == numpy(optimizer.dynamic_scale)
    assert 0 == numpy(optimizer.last_step.good_steps)
    assert START.tolist() == numpy(variable).tolist()


def test_check_finite_looks_at_what_there_is():
    optimizer = descent()
    tensors = [keras.ops.convert_to_tensor(each) for each in (GRADIENT, BAD)]
    assert numpy(optimizer.check_finite([tensors[0], None]))
    assert not numpy(optimizer.check_finite([tensors[0], None, tensors[1]]))


@only_on("jax", "torch")
def test_stateless_apply_returns_new_values_on_jax_and_torch():
    optimizer = descent(initial_scale=2.0, dynamic_growth_steps=2)
    variable = keras.Variable(START)
    optimizer.build([variable])
    values = [each.value for each in optimizer.variables]
    weights = [keras.ops.convert_to_tensor(START)]
    for scaled in (GRADIENT * 2.0, BAD, GRADIENT * 1.0):
        gradient = keras.ops.convert_to_tensor(scaled)
        weights, values = optimizer.stateless_apply(values, [gradient], weights)
    assert (START - GRADIENT).tolist() == numpy(weights[0]).tolist()
    places = {each.name: place for place, each in enumerate(optimizer.variables)}
    assert 1.0 == numpy(values[places["dynamic_scale"]])
    assert 1 == numpy(values[places["skipped_steps"]])


@only_on("jax", "torch")
def test_stateless_apply_checks_what_it_is_given():
    optimizer = descent()
    with pytest.raises(ValueError, match="must be built"):
        optimizer.stateless_apply([], [], [])
    optimizer.build([keras.Variable(START)])
    values = [each.value for each in optimizer.variables]
    with pytest.raises(StructureError, match="optimizer_variables must hold one value"):
        optimizer.stateless_apply(values[:-1], [None], [START])
    with pytest.raises(StructureError, match="trainable_variables must hold one value"):
        optimizer.stateless_apply(values, [None], [])


@only_on("tensorflow")
def test_stateless_apply_on_tensorflow_is_an_error_as_in_keras():
    optimizer = descent()
    optimizer.build([keras.Variable(START)])
    with pytest.raises(ValueError, match="not supported with the TensorFlow backend"):
        optimizer.stateless_apply(
            [each.value for each in optimizer.variables], [GRADIENT], [START]
        )


def test_the_learning_rate_and_iterations_are_those_of_the_inner_optimizer():
    steps = Steps(descent(), START)
    steps.optimizer.learning_rate = 0.25
    assert 0.25 == numpy(steps.optimizer.inner_optimizer.learning_rate)
    steps.step(GRADIENT * 2.0**15)
    assert (START - 0.25 * GRADIENT).tolist() == steps.weights()[0].tolist()
    assert 1 == numpy(steps.optimizer.inner_optimizer.iterations)


def test_building_twice_makes_no_second_set_of_variables():
    steps = Steps(descent(), START)
    count = len(steps.optimizer.variables)
    steps.optimizer.build(steps.variables)
    assert count == len(steps.optimizer.variables)


def test_an_inner_optimizer_that_is_built_is_not_built_again():
    class Careless(keras.optimizers.SGD):
        builds = 0

        def build(self, variables):
            self.builds += 1
            super().build(variables)

    inner, variable = Careless(0.5), keras.Variable(START)
    inner.build([variable])
    LossScaleOptimizer(inner).build([variable])
    assert 1 == inner.builds


def test_a_gradient_of_another_shape_changes_nothing():
    from lossscale.errors import StructureError

    first, second = keras.Variable([1.0, 1.0, 1.0]), keras.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0)
    optimizer.build([first, second])
    for wrong in (keras.ops.ones((2, 2)), keras.ops.ones((1,)), keras.ops.ones(())):
        with pytest.raises(StructureError, match="has the shape"):
            optimizer.apply([keras.ops.ones((3,)), wrong], [first, second])
    assert [1.0, 1.0, 1.0] == numpy(first).tolist()


def test_moving_averages_of_no_step_at_all_do_not_replace_the_weights():
    variable = keras.Variable([1.0, 2.0])
    inner = keras.optimizers.SGD(1.0, use_ema=True)
    optimizer = LossScaleOptimizer(inner, 2.0)
    optimizer.build([variable])
    optimizer.apply([keras.ops.convert_to_tensor([np.inf, 0.0], "float32")], [variable])
    optimizer.finalize_variable_values([variable])
    assert [1.0, 2.0] == numpy(variable).tolist()
    optimizer.apply([keras.ops.convert_to_tensor([2.0, 0.0], "float32")], [variable])
    optimizer.finalize_variable_values([variable])
    assert [1.0, 2.0] != numpy(variable).tolist()
