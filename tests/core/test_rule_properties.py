"""What must always hold, whatever the settings and whatever arrives."""

import math

import numpy as np
import pytest
from helpers.policies import float32s, policies
from hypothesis import example, given
from hypothesis import strategies as st

import lossscale.numpy as ls
from lossscale import Dynamic, Fixed, ScaleState, Signal
from lossscale.core.validation import FLOAT32_MAX, SMALLEST_NORMAL

TINY, HUGE = SMALLEST_NORMAL, FLOAT32_MAX


steps = st.lists(st.booleans(), min_size=1, max_size=60) | st.sampled_from(
    [[True] * 300, [False] * 300]
)


def walk(policy, flags):
    """Yield the state before and after each step."""
    state = ls.init(policy)
    for flag in flags:
        after = ls.update(policy, state, Signal(flag))
        yield state, flag, after
        state = after


@pytest.mark.slow
@given(policies(), steps)
@example(Dynamic(), [False] * 300)
@example(Dynamic(growth_interval=1), [True] * 300)
def test_the_scale_stays_within_its_bounds(policy, flags):
    low, high = np.float32(policy.min_scale), np.float32(policy.max_scale)
    for _, _, after in walk(policy, flags):
        assert low <= after.scale <= high


@pytest.mark.slow
@given(policies(), steps)
def test_the_scale_and_its_reciprocal_are_never_zero_infinite_or_nan(policy, flags):
    for _, _, after in walk(policy, flags):
        assert math.isfinite(after.scale)
        assert after.scale > 0
        with np.errstate(all="raise", under="ignore"):
            inverse = np.float32(1) / after.scale
        assert 0 < inverse < math.inf


@given(steps)
def test_with_our_defaults_the_scale_and_its_reciprocal_are_normal_numbers(flags):
    for growth_interval in (1, 2000):
        policy = Dynamic(growth_interval=growth_interval)
        for _, _, after in walk(policy, flags):
            assert after.scale >= TINY
            assert np.float32(1) / after.scale >= TINY


@given(policies(), steps)
def test_a_finite_step_never_lowers_and_an_overflow_never_raises(policy, flags):
    for before, flag, after in walk(policy, flags):
        if flag:
            assert after.scale >= before.scale
        else:
            assert after.scale <= before.scale


@given(policies(powers_of_two=True), steps)
def test_a_power_of_two_stays_one(policy, flags):
    for _, _, after in walk(policy, flags):
        assert math.frexp(after.scale)[0] == 0.5


@pytest.mark.slow
@given(policies(), steps)
def test_counters_never_go_below_zero_and_good_stays_below_its_threshold(policy, flags):
    for _, flag, after in walk(policy, flags):
        assert 0 <= after.good_steps < policy.settings.growth_threshold
        assert after.bad_steps >= 0
        if not flag:
            assert after.good_steps == 0


@given(policies(), steps)
def test_dtypes_stay_float32_int32_int32(policy, flags):
    for _, _, after in walk(policy, flags):
        assert (np.float32, np.int32, np.int32) == tuple(value.dtype for value in after)


@given(policies(), st.integers(0, 2**31 - 2), st.integers(0, 2**31 - 2), st.booleans())
def test_counters_above_their_thresholds_fire_at_once(policy, good, bad, finite):
    state = ls.init(policy, ScaleState(policy.init_scale, good, bad))
    after = ls.update(policy, state, Signal(finite))
    threshold = policy.settings.growth_threshold
    if finite and good + 1 >= threshold:
        assert (policy.settings.good_after_growth, 0) == (
            after.good_steps,
            after.bad_steps,
        )
        assert after.scale >= state.scale
    if not finite and bad + 1 >= policy.hysteresis:
        left = 0 if policy.backoff_resets_hysteresis else bad + 1
        assert (0, left) == (after.good_steps, after.bad_steps)
        assert after.scale <= state.scale


@pytest.mark.slow
@given(policies(), steps)
def test_a_vector_of_scales_is_the_same_as_each_alone(policy, flags):
    starts = [policy.min_scale, policy.init_scale, policy.max_scale]
    together = ScaleState(
        np.array(starts, np.float32), np.zeros(3, np.int32), np.zeros(3, np.int32)
    )
    alone = [ls.init(policy, ScaleState(start, 0, 0)) for start in starts]
    for flag in flags:
        together = ls.update(policy, together, Signal(np.array([flag] * 3)))
        alone = [ls.update(policy, state, Signal(flag)) for state in alone]
        for place, state in enumerate(alone):
            assert state == ScaleState(*(value[place] for value in together))


@given(float32s(TINY, HUGE), steps)
def test_a_fixed_scale_never_moves(value, flags):
    policy = Fixed(value)
    for before, _, after in walk(policy, flags):
        assert before == after
