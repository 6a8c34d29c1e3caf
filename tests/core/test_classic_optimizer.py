"""LossScaleOptimizer bound to NumPy."""

import math

import numpy as np
import pytest
from helpers.traces import read

import lossscale.numpy as ls
from lossscale import Signal
from lossscale.errors import GradientError, SettingError, SettingTypeError


class Descent:
    """Plain gradient descent on `loss = coefficient * weight`, as the traces used.

    Its variable and its step counter are NumPy arrays that it changes in place, and
    its arithmetic is done in the weight's dtype: the wrapper sees what a framework's
    optimizer would show it.
    """

    def __init__(self, rate=1.0):
        self.rate, self.calls = rate, 0

    def compute_gradients(self, loss, var_list=None):
        value = loss() if callable(loss) else loss
        return [(None if v is None else np.asarray(value) / v, v) for v in var_list]

    def apply_gradients(self, grads_and_vars, global_step=None):
        self.calls += 1
        for gradient, variable in grads_and_vars:
            variable[...] = variable - self.rate * gradient
        if global_step is not None:
            global_step += 1


def weight(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize("file", ["opt_contrib.tf1.15.5.eager"])
def test_the_recorded_optimizer_is_replayed(file):
    for row in read(f"tensorflow/{file}"):
        names = ("init_loss_scale", "incr_every_n_steps", "decr_every_n_nan_or_inf")
        arguments = [
            row["config"][name] for name in (*names, "incr_ratio", "decr_ratio")
        ]
        manager = ls.ExponentialUpdateLossScaleManager(*arguments, at_floor="clamp")
        optimizer = ls.LossScaleOptimizer(Descent(), manager)
        variable, step = weight(0.0), np.zeros((), np.int64)
        bad = row.get("bad_value") or ["NaN"] * len(row["finite"])
        bad = bad if isinstance(bad, list) else [bad] * len(row["finite"])
        for place, finite in enumerate(row["finite"]):
            gradient = np.float32(1.0 if finite else float(bad[place] or "NaN"))
            result = optimizer.apply_gradients([(gradient, variable)], global_step=step)
            assert result is None
            assert row["scale"][place] == manager.get_loss_scale()
            assert row["var"][place] == variable[0]
            assert row["step"][place] == step


def test_gradients_come_back_unscaled_with_the_same_variable():
    variable = weight(2.0)
    optimizer = ls.LossScaleOptimizer(Descent(), ls.FixedLossScaleManager(1e4))
    ((gradient, same),) = optimizer.compute_gradients(
        lambda: np.float32(1e-4) * variable, [variable]
    )
    assert same is variable
    assert np.float32(1e-4) == pytest.approx(gradient[0], rel=1e-6)
    assert [2.0] == variable.tolist()


def test_a_float16_gradient_that_underflows_is_saved_by_the_scale():
    def gradient_of(loss_scale):
        optimizer = ls.LossScaleOptimizer(HalfPrecision(), loss_scale)
        ((gradient, _),) = optimizer.compute_gradients(
            lambda: np.float32(1), [weight(1)]
        )
        return float(gradient)

    class HalfPrecision(Descent):
        """Multiplies the incoming gradient by 1e-4 twice and by 1e4, in float16."""

        def compute_gradients(self, loss, var_list):
            small = np.float16(1e-4)
            with np.errstate(over="ignore"):
                upstream = np.float16(loss()) * small * small
            return [(upstream * np.float16(1e4), v) for v in var_list]

    assert gradient_of(1) == 0.0
    assert gradient_of(1e4) == pytest.approx(1e-4, rel=1e-2)


def test_bad_gradients_are_skipped_under_a_fixed_manager_and_a_fixed_scale():
    for loss_scale in (ls.FixedLossScaleManager(8), ls.FixedLossScale(8), 8):
        variable = weight(1.0)
        optimizer = ls.LossScaleOptimizer(Descent(), loss_scale)
        seen = []
        for value in (math.nan, math.inf, 0.1):
            optimizer.apply_gradients([(np.float32(value), variable)])
            seen.append(variable[0].item())
        assert [1.0, 1.0, pytest.approx(0.9)] == seen


def test_a_manager_of_ones_own_is_asked_and_updated():
    class Steps(ls.LossScaleManager):
        value = 8

        def get_loss_scale(self):
            return np.float32(self.value)

        def update_loss_scale(self, finite_grads):
            self.value += 1 if finite_grads else -1

    manager, variable = Steps(), weight(1.0)
    optimizer = ls.LossScaleOptimizer(Descent(), manager)
    seen = []
    for value in (math.nan, math.inf, 0.1):
        optimizer.apply_gradients([(np.float32(value), variable)])
        seen.append(manager.value)
    assert [7, 6, 7] == seen


def test_bad_gradients_are_applied_to_those_who_ask_for_it():
    variable = weight(1.0)
    optimizer = ls.LossScaleOptimizer(Descent(), 8, skip_nonfinite=False)
    optimizer.apply_gradients([(np.float32(np.nan), variable)])
    assert np.isnan(variable[0])


def test_a_loss_scale_of_ones_own_decides_about_applying():
    class Never(ls.LossScale):
        updates = 0

        def __call__(self):
            return np.float32(4)

        def update(self, grads):
            self.updates += 1
            return None, False

        def get_config(self):
            return {}

    never, variable = Never(), weight(1.0)
    inner = Descent()
    optimizer = ls.LossScaleOptimizer(inner, never)
    optimizer.apply_gradients([(np.float32(1), variable)])
    assert (1, 0) == (never.updates, inner.calls)


@pytest.mark.parametrize(("decision", "calls"), [(2, 1), (1.0, 1), (0, 0)])
def test_any_truth_value_is_a_decision_and_anything_else_an_error(decision, calls):
    class Says(ls.DynamicLossScale):
        def update(self, grads):
            return None, decision

    inner = Descent()
    ls.LossScaleOptimizer(inner, Says()).apply_gradients([(weight(1.0), weight(1.0))])
    assert calls == inner.calls
    decision = "yes"
    with pytest.raises(TypeError, match="one boolean"):
        ls.LossScaleOptimizer(inner, Says()).apply_gradients([(weight(1), weight(1))])


def test_a_subclass_with_an_update_of_its_own_is_honoured():
    class Careful(ls.DynamicLossScale):
        def update(self, grads):
            super().update(grads)
            return None, False

    class Quiet(ls.FixedLossScale):
        def update_from_finite(self, finite):
            return None, False

        def update(self, grads):
            return self.update_from_finite(True)

    inner = Descent()
    ls.LossScaleOptimizer(inner, Quiet(8)).apply_gradients([(weight(1.0), weight(1.0))])
    assert 0 == inner.calls
    optimizer = ls.LossScaleOptimizer(inner, Careful(8, 1))
    optimizer.apply_gradients([(np.float32(1), weight(1.0))])
    assert 0 == inner.calls
    assert 16.0 == optimizer.loss_scale()


def test_slots_and_steps_do_not_move_on_a_skipped_step():
    variable, step = weight(1.0, 2.0), np.zeros((), np.int64)
    optimizer = ls.LossScaleOptimizer(Descent(), ls.DynamicLossScale(2, 1, 4))
    optimizer.apply_gradients([(weight(1.0, 1.0), variable)], global_step=step)
    assert 8.0 == optimizer.loss_scale()
    optimizer.apply_gradients([(weight(1.0, np.inf), variable)], global_step=step)
    assert (2.0, 1) == (optimizer.loss_scale(), step)
    assert [0.0, 1.0] == variable.tolist()


def test_none_gradients_are_left_out_and_iterators_are_taken():
    first, second = weight(1.0), weight(2.0)
    optimizer = ls.LossScaleOptimizer(Descent(), "dynamic")
    pairs = iter([(None, first), (weight(1.0), second)])
    optimizer.apply_gradients(pairs)
    assert ([1.0], [1.0]) == (first.tolist(), second.tolist())


def test_the_scale_does_not_move_when_the_optimizer_raises():
    class Broken(Descent):
        def apply_gradients(self, grads_and_vars, global_step=None):
            raise OSError

    for loss_scale in (
        ls.DynamicLossScale(8, 1),
        ls.ExponentialUpdateLossScaleManager(8, 1),
    ):
        optimizer = ls.LossScaleOptimizer(Broken(), loss_scale)
        with pytest.raises(OSError):  # noqa: PT011  # our own, without a text
            optimizer.apply_gradients([(weight(1.0), weight(1.0))])
        assert 8.0 == optimizer._current()


def test_arguments_go_by_position_and_by_contribs_name():
    variable, step = weight(5.0), np.zeros((), np.int64)
    manager = ls.FixedLossScaleManager(8)
    optimizer = ls.LossScaleOptimizer(opt=Descent(), loss_scale_manager=manager)
    optimizer.apply_gradients([(weight(1.0), variable)], step)
    assert ([4.0], 1) == (variable.tolist(), step)


def test_a_name_goes_to_apply_gradients():
    class Named(Descent):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            self.name = name

    inner = Named()
    variable = weight(5.0)
    ls.LossScaleOptimizer(inner, 8).minimize(
        lambda: 2 * variable, var_list=[variable], name="train"
    )
    assert "train" == inner.name


def test_minimize_computes_and_applies():
    variable, step = weight(5.0), np.zeros((), np.int64)
    optimizer = ls.LossScaleOptimizer(Descent(), 10)
    optimizer.minimize(lambda: 2 * variable, global_step=step, var_list=[variable])
    assert ([3.0], 1) == (variable.tolist(), step)


def test_whatever_arrives_the_weights_stay_finite():
    rng = np.random.default_rng(5)
    values = np.array(
        [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0.0, 1.0], np.float32
    )
    for loss_scale in (
        "dynamic",
        2.0**15,
        ls.ExponentialUpdateLossScaleManager(2**15, 3),
    ):
        variable = np.zeros(3, np.float64)
        optimizer = ls.LossScaleOptimizer(Descent(1e-3), loss_scale)
        for _ in range(400):
            optimizer.apply_gradients([(rng.choice(values, 3), variable)])
            assert np.isfinite(variable).all()


def test_a_gradient_that_cannot_be_squared_is_skipped_and_the_scale_stays():
    class Own(ls.LossScaleManager):
        value = 8

        def get_loss_scale(self):
            return np.float32(self.value)

        def update_loss_scale(self, finite_grads):
            self.value += 1

    class Other(ls.DynamicLossScale):
        def update(self, grads):
            return super().update(grads)

    for loss_scale in (
        ls.DynamicLossScale(8, 2),
        ls.ExponentialUpdateLossScaleManager(8, 2, 1),
        ls.FixedLossScale(8),
        Own(),
        Other(8, 2),
    ):
        variable, inner = weight(1.0), Descent()
        optimizer = ls.LossScaleOptimizer(inner, loss_scale)
        for value in (1e20, -3e38, 1e20):
            optimizer.apply_gradients([(np.float32(value), variable)])
        assert ([1.0], 8.0, 0) == (variable.tolist(), optimizer._current(), inner.calls)
        optimizer.apply_gradients([(np.float32(1e18), variable)])
        assert 1 == inner.calls


def test_a_large_gradient_next_to_an_infinite_one_is_an_overflow():
    optimizer = ls.LossScaleOptimizer(Descent(), ls.DynamicLossScale(8, 2))
    optimizer.apply_gradients([(weight(1e20, np.inf), weight(1.0, 1.0))])
    assert 4.0 == optimizer.loss_scale()


@pytest.mark.parametrize(
    ("inner", "loss_scale", "message"),
    [
        (None, 8, "opt must be an optimizer"),
        (object(), 8, "opt must be an optimizer"),
        (Descent(), None, "cannot be None"),
        (Descent(), 10**400, "must be"),
        (Descent(), "static", "A loss scale is"),
        (Descent(), 0.5, "1 or more"),
    ],
)
def test_wrong_arguments_are_refused(inner, loss_scale, message):
    with pytest.raises(ValueError, match=message):
        ls.LossScaleOptimizer(inner, loss_scale)


@pytest.mark.parametrize("flag", [math.inf, -math.inf, np.float32(np.inf), math.nan])
def test_a_flag_that_is_no_number_is_refused(flag):
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 2)
    with pytest.raises(GradientError, match="finite_grads must be one boolean"):
        manager.update_loss_scale(flag)
    assert 8.0 == manager.get_loss_scale()


@pytest.mark.parametrize("flag", [[True], (True,), np.array([True])])
def test_a_flag_in_a_sequence_of_one_is_that_flag(flag):
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 1)
    manager.update_loss_scale(flag)
    assert 16.0 == manager.get_loss_scale()


def test_a_signal_is_no_flag():
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 2)
    with pytest.raises(GradientError, match="finite_grads must be one boolean"):
        manager.update_loss_scale(Signal(finite=True))


def custom(value=8.0, answer=(None, True)):
    """Return a loss scale of a user's, with what its two methods return."""

    class Own(ls.LossScale):
        def __call__(self):
            return value

        def update(self, grads):
            del grads
            return answer

        def get_config(self):
            return {}

    return Own()


@pytest.mark.parametrize("value", [8.0, 8, np.float64(8.0), np.array(8.0)])
def test_a_custom_scale_may_return_a_number_of_any_kind(value):
    variable = weight(4.0)
    optimizer = ls.LossScaleOptimizer(Descent(), custom(value))
    ((gradient, _),) = optimizer.compute_gradients(lambda: 4.0 * variable, [variable])
    assert (4.0, np.float32) == (gradient[0], gradient.dtype)


@pytest.mark.parametrize("value", [None, "8", [8.0, 8.0]])
def test_a_custom_scale_that_is_no_number_is_named(value):
    variable = weight(4.0)
    optimizer = ls.LossScaleOptimizer(Descent(), custom(value))
    with pytest.raises(SettingTypeError, match=r"Own\.__call__\(\) returned"):
        optimizer.minimize(lambda: 4.0 * variable, var_list=[variable])


@pytest.mark.parametrize("answer", [None, True, (None, True, True), (None, None)])
def test_a_custom_update_that_answers_something_else_is_named(answer):
    variable = weight(4.0)
    optimizer = ls.LossScaleOptimizer(Descent(), custom(answer=answer))
    with pytest.raises(SettingTypeError, match=r"Own\.update\(\) returned"):
        optimizer.apply_gradients([(weight(1.0), variable)])
    assert [4.0] == variable.tolist()


def test_the_error_about_a_scale_names_everything_that_can_be_given():
    with pytest.raises(SettingError, match="a manager, a LossScale, a Python number"):
        ls.LossScaleOptimizer(Descent(), {})


def test_a_wrapper_is_not_wrapped():
    with pytest.raises(SettingError, match="scales its loss already"):
        ls.LossScaleOptimizer(ls.LossScaleOptimizer(Descent(), 4), 8)
