"""Finite gradients that are too large for the optimizer: skipped, and the scale stays.

No lower scale makes a true gradient smaller. The report says why a step was skipped,
and for the gradient of which variable.
"""

import numpy as np
import pytest
from helpers.keras_backend import BACKEND, QUIET, keras, numpy
from helpers.keras_steps import Steps, check_finite

from lossscale import Dynamic, Fixed
from lossscale.errors import SettingError
from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

START = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def gradient(*values):
    return np.array([*values, *[1.0] * (4 - len(values))], np.float32)


@pytest.mark.parametrize(
    "policy", [Dynamic(init_scale=8.0, growth_interval=3, hysteresis=2), Fixed(8.0)]
)
def test_a_gradient_that_cannot_be_squared_leaves_the_weights_and_the_scale(policy):
    steps = Steps(LossScaleOptimizer(keras.optimizers.Adam(0.1), policy=policy), START)
    for large in (1e20, -1e20, 3e38):
        steps.step(gradient(large) * np.float32(8.0 if abs(large) < 1e30 else 1.0))
        assert START.tolist() == steps.weights()[0].tolist()
        report = steps.optimizer.last_step
        assert (8.0, 0, 0) == (steps.scale(), steps.good(), int(report.bad_steps))
        assert (True, "headroom") == (bool(report.skipped), report.reason)
    assert (3, 3) == (int(report.skipped_steps), int(report.consecutive_skips))
    steps.step(gradient(1e18))
    assert 1 == steps.iterations()
    assert steps.optimizer.last_step.reason is None


def test_the_counters_stay_as_well():
    policy = Dynamic(init_scale=8.0, growth_interval=3, hysteresis=3)
    steps = Steps(LossScaleOptimizer(keras.optimizers.Adam(0.1), policy=policy), START)
    for large in (np.inf, 1.0, 1e21, 1.0, 1e21):
        steps.step(gradient(large))
    report = steps.optimizer.last_step
    assert (2, 1) == (int(report.good_steps), int(report.bad_steps))


@pytest.mark.parametrize(("bad", "reason"), [(np.inf, "inf"), (np.nan, "nan")])
def test_what_is_not_finite_lowers_the_scale_whatever_else_is_too_large(bad, reason):
    steps = Steps(LossScaleOptimizer(keras.optimizers.Adam(0.1), 8.0), START, START)
    steps.step(gradient(3e38), gradient(bad))
    assert 4.0 == steps.scale()
    assert reason == steps.optimizer.last_step.reason
    names = [variable.path for variable in steps.variables]
    assert {names[1]: reason} == steps.optimizer.last_step.nonfinite


def test_the_report_names_the_variables():
    steps = Steps(
        LossScaleOptimizer(keras.optimizers.Adam(0.1), 8.0), START, START, START
    )
    names = [variable.path for variable in steps.variables]
    cases = [
        ((1.0, np.nan, -np.inf), {names[1]: "nan", names[2]: "inf"}, "nan"),
        ((3e38, 1.0, 1e21), {names[0]: "headroom", names[2]: "headroom"}, "headroom"),
        ((1.0, 1.0, 1.0), {}, None),
        ((np.inf, 1.0, 1e21), {names[0]: "inf"}, "inf"),
    ]
    for values, expected, reason in cases:
        steps.step(*(gradient(value) for value in values))
        report = steps.optimizer.last_step
        assert (expected, reason) == (report.nonfinite, report.reason)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_missing_gradient_is_no_reason():
    steps = Steps(LossScaleOptimizer(keras.optimizers.Adam(0.1), 8.0), START, START)
    steps.step(None, gradient(np.inf))
    assert {steps.variables[1].path: "inf"} == steps.optimizer.last_step.nonfinite


def test_some_of_the_variables_are_named_in_their_places():
    if BACKEND == "jax":
        pytest.skip("stateless_apply takes all variables")
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1), 8.0)
    variables = [keras.Variable(START) for _ in range(3)]
    optimizer.build(variables)
    bad = keras.ops.convert_to_tensor(gradient(np.inf))
    optimizer.apply([bad], [variables[2]])
    assert {variables[2].path: "inf"} == optimizer.last_step.nonfinite


def test_what_is_only_added_may_be_larger():
    steps = Steps(LossScaleOptimizer(keras.optimizers.SGD(1e-20), 1.0), np.zeros(4))
    steps.step(gradient(1e28))
    assert -1e8 == pytest.approx(steps.weights()[0][0], rel=1e-6)
    steps.step(gradient(1e38))
    assert (1, 1.0) == (steps.iterations(), steps.scale())


def test_200_true_gradients_beyond_float16_leave_the_scale():
    steps = Steps(
        LossScaleOptimizer(keras.optimizers.Adam(0.1, epsilon=1e-3), 8.0),
        START,
        dtype="float16",
    )
    for _ in range(200):
        steps.step(gradient(1e5 * 8.0))
    assert (8.0, 0) == (steps.scale(), steps.iterations())


def test_200_true_gradients_that_are_clipped_are_applied():
    inner = keras.optimizers.Adam(1e-4, epsilon=1e-3, global_clipnorm=1.0)
    steps = Steps(LossScaleOptimizer(inner, 8.0), START, dtype="float16")
    for _ in range(200):
        steps.step(gradient(1e5 * 8.0))
    assert (8.0, 200) == (steps.scale(), steps.iterations())
    check_finite(steps.weights())


@pytest.mark.parametrize("name", ["Adagrad", "Ftrl", "SGD", "Lion"])
def test_no_number_of_large_gradients_fills_the_state(name):
    """Each is far within float32; without a bound their sum is not in the end."""
    options = {"momentum": 0.99} if name == "SGD" else {}
    inner = getattr(keras.optimizers, name)(1.0, **options)
    steps = Steps(LossScaleOptimizer(inner, 1.0), START)
    for _ in range(150):
        for values in (
            (1.8e19, 2e15, 1e37, 7e28),
            (1.5e15, 2e15, 1.0, -2e15),
            (1.8e19, 0.0, 1.0, -1.8e19),
            (7e26, 1e26, -1e27, 0.0),
        ):
            steps.step(gradient(*values))
    assert steps.iterations() >= 150
    check_finite(steps.weights(), name)
    check_finite([numpy(each) for each in inner.variables], name)


def test_an_ordinary_gradient_is_never_too_large():
    names = ("SGD", "Adam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Ftrl", "Lion")
    for name in names:
        steps = Steps(
            LossScaleOptimizer(getattr(keras.optimizers, name)(1e-3), 1.0), START
        )
        steps.step(gradient(1e15))
        assert 1 == steps.iterations()


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Adam", {"epsilon": 1e-8}), ("Adamax", {}), ("Adafactor", {})],
)
def test_an_epsilon_that_is_zero_in_float16_is_refused(name, settings):
    optimizer = LossScaleOptimizer(getattr(keras.optimizers, name)(0.01, **settings))
    with pytest.raises(SettingError, match="is 0 in float16"):
        optimizer.build([keras.Variable(np.ones(2), dtype="float16")])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Adam", {}),
        ("Adamax", {"epsilon": 1e-4}),
        ("Adafactor", {"epsilon_1": 1e-4}),
        ("Nadam", {}),
        ("Adadelta", {}),
    ],
)
def test_zero_and_small_gradients_leave_float16_weights_finite(name, settings):
    inner = getattr(keras.optimizers, name)(0.01, **settings)
    steps = Steps(LossScaleOptimizer(inner, 8.0), np.ones(4), dtype="float16")
    for _ in range(5):
        steps.step(np.array([0.0, 1e-5, 1e-3, 8.0], np.float16))
    assert np.isfinite(steps.weights()[0]).all()


def test_an_epsilon_that_float32_has_divides_as_in_an_unwrapped_optimizer():
    def train(optimizer, scale):
        variable = keras.Variable(np.ones(2, np.float32))
        gradient = keras.ops.convert_to_tensor(np.float32([0.0, 1e-7]) * scale)
        for _ in range(3):
            optimizer.apply([gradient], [variable])
        return numpy(variable).tolist()

    def make_adam():
        return keras.optimizers.Adam(0.01, epsilon=1e-8)

    scale = np.float32(8.0)
    expected = train(make_adam(), np.float32(1.0))
    assert 1.0 == expected[0] > expected[1]
    assert expected == train(LossScaleOptimizer(make_adam(), float(scale)), scale)


@pytest.mark.parametrize("wrapped", [False, True])
def test_adafactor_of_keras_makes_nan_of_a_row_and_a_column_of_zeros(wrapped):
    """By itself: 1e-30 times 1e-30 is 0 in float32. The page says so."""
    gradient = np.zeros((2, 2), np.float32)
    gradient[0, 0] = 1.0
    for epsilon, finite in ((1e-30, False), (1e-15, True)):
        optimizer = keras.optimizers.Adafactor(0.01, epsilon_1=epsilon)
        if wrapped:
            optimizer = LossScaleOptimizer(optimizer, 1.0)
        variable = keras.Variable(np.ones((2, 2), np.float32))
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        assert finite == np.isfinite(numpy(variable)).all()
