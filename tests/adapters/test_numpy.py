"""The NumPy adapter: the conformance suite, and what is its own."""

import numpy as np
import pytest
from conformance import (
    ClassicConformance,
    DataPolicyConformance,
    Framework,
    FunctionalConformance,
    HeadroomConformance,
)

import lossscale.numpy as ls
from lossscale import Dynamic, Fixed, ScaleState, Signal
from lossscale.errors import (
    GradientError,
    SettingError,
    SettingTypeError,
    StateError,
)
from lossscale.presets import PRESETS


class TestNumpy(
    FunctionalConformance,
    DataPolicyConformance,
    HeadroomConformance,
    ClassicConformance,
):
    framework = Framework(module=ls, array=np.asarray, numpy=np.asarray)


def state(scale):
    return ls.init(Fixed(scale))


def test_plain_numbers_are_losses_too():
    assert np.float32(8.0) == ls.scale(1, state(8.0))
    assert 8.0 == ls.scale(1.0, state(8.0))


def test_a_loss_that_is_no_float_is_refused():
    for wrong in (np.int64(3), True, "3", 1j):
        with pytest.raises(GradientError, match="The loss is"):
            ls.scale(wrong, state(8.0))


def test_a_policys_own_first_state_is_taken_in_float32():
    policy = Dynamic(init_scale=7.3, growth_factor=1.7, growth_interval=1)
    after = ls.update(policy, policy.init(), Signal(True))
    assert np.float32 == after.scale.dtype
    assert np.float32(7.3) * np.float32(1.7) == after.scale


def test_the_largest_value_of_a_float64_gradient_stays_finite():
    _, signal = ls.unscale([np.array([1e300])], state(1.0), measure=("amax", "norm"))
    assert (1e300, np.float64) == (signal.amax, signal.amax.dtype)


def test_arrays_of_either_byte_order_are_taken_and_masked_ones_are_not():
    swapped = np.array([8.0, 4.0]).astype(">f4")
    grads, _ = ls.unscale([swapped], state(4.0))
    assert [2.0, 1.0] == grads[0].tolist()
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    with pytest.raises(GradientError, match="masked"):
        ls.unscale([masked], state(4.0))


def test_it_works_where_numpy_raises_on_everything():
    with np.errstate(all="raise"):
        tiny = np.array([1e-40, 3e38, np.inf], np.float32)
        _, signal = ls.unscale([tiny], state(2.0**-20), measure=("norm", "amax"))
        assert not signal.finite
        assert np.float32(np.inf) == ls.scale(np.float32(3e38), state(2.0**20))


@pytest.mark.parametrize(
    "wrong",
    [np.isfinite(np.ones(3)), [], np.array([True]), np.ma.masked_array([True])],
    ids=["elementwise", "empty", "one in a row", "masked"],
)
def test_a_flag_of_another_shape_never_makes_a_vector_of_the_state(wrong):
    with pytest.raises(GradientError, match="one boolean"):
        ls.update(Dynamic(), state(8.0), Signal(wrong))


def test_losses_beyond_every_format_are_infinite_with_their_sign():
    assert np.float32(-np.inf) == ls.scale(-(10**400), state(1.0))
    assert np.float32(np.inf) == ls.scale(10**300, state(1.0))


def test_select_wants_one_flag():
    with pytest.raises(GradientError, match="one boolean"):
        ls.select(np.array([True, False]), [1], [2])


def test_a_flag_that_is_nan_is_refused():
    with pytest.raises(GradientError, match="one boolean"):
        ls.DynamicLossScale().update_from_finite(float("nan"))


def test_select_copies_nothing():
    new, old = {"w": np.ones(2)}, {"w": np.zeros(2)}
    assert new is ls.select(np.True_, new, old)
    assert old is ls.select(np.False_, new, old)


def test_one_measurement_may_be_named_without_a_list():
    _, signal = ls.unscale([np.ones(2, np.float32)], state(2.0), measure="norm")
    assert np.float32(np.sqrt(0.5)) == signal.norm
    with pytest.raises(SettingError, match="Cannot measure"):
        ls.unscale([], state(2.0), measure="norms")


def test_the_smallest_normal_number_is_not_subnormal():
    tiny = np.finfo(np.float16).smallest_normal
    grads = [np.array([tiny, tiny / 2, 0], np.float16)]
    _, signal = ls.unscale(grads, state(1.0), measure=("subnormal_fraction",))
    assert np.float32(1 / 3) == signal.subnormal_fraction


def test_a_norm_beyond_float32_sums_is_still_finite():
    huge = [np.full(4, 1e25, np.float32)]
    _, signal = ls.unscale(huge, state(1.0), measure=("norm",))
    assert np.float32(2e25) == signal.norm


def test_signals_of_any_boolean_kind_are_taken():
    policy = Dynamic()
    for true in (True, np.True_, np.array(True)):
        after = ls.update(policy, ls.init(policy), Signal(true))
        assert ScaleState(65536.0, 1, 0) == after


def test_what_is_no_policy_is_refused():
    for wrong, fix in (
        (Dynamic, r"Write Dynamic\(\)\."),
        (8.0, r"such as .* got 8.0\."),
        ("torch", r"presets.get\('torch'\)"),
        (PRESETS["torch"], r"Pass the \.policy of the Preset\."),
    ):
        with pytest.raises(SettingTypeError, match=f"^policy must be a policy.*{fix}"):
            ls.init(wrong)


def test_arguments_in_another_order_are_reported():
    policy = Dynamic()
    first, grads = ls.init(policy), [np.ones(2)]
    for call, given in (
        (lambda: ls.scale(first, 1.0), "a float"),
        (lambda: ls.scale(1.0, 8), "an int"),
        (lambda: ls.scale(1.0, Fixed(8.0)), "a Fixed"),
        (lambda: ls.unscale(first, np.ones(2)), "a NumPy array"),
        (lambda: ls.unscale(first, grads), "a list"),
        (lambda: ls.update(first, policy, Signal(True)), "a Dynamic"),
    ):
        words = rf"The state is {given}, expected the ScaleState .*scale\(loss, state\)"
        with pytest.raises(StateError, match=words):
            call()
