"""`AutoStart`: where the first scale ends up, and after how many tries."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from helpers.policies import policies as rules
from hypothesis import given
from hypothesis import strategies as st

import lossscale.numpy as ls
from lossscale import AutoStart, Dynamic, Signal
from lossscale.errors import SettingError, SettingTypeError

LARGEST = 65504.0


def pick(condition, first, second):
    return first if condition else second


def start(policy, magnitude, *, inside=0.0, steps=30):
    """Run a network whose largest gradient, and the largest inside it, never change.

    Returns how many steps overflowed before the first finite one, and the states.
    """
    state, lost, states = ls.init(policy), None, []
    for step in range(steps):
        amax = np.float32(magnitude) * state.scale
        finite = max(amax, np.float32(inside) * state.scale) <= LARGEST
        if finite and lost is None:
            lost = step
        signal = Signal(finite, amax=np.float32(min(amax, LARGEST)))
        state = ls.update(policy, state, signal)
        states.append(state)
    return lost, states


@given(st.floats(2.0**-24, 65000.0, width=32), st.floats(0, 6))
def test_at_most_four_tries_find_a_scale_with_the_margin(magnitude, margin):
    lost, states = start(AutoStart(margin=margin), magnitude)
    assert lost <= 4
    scale = states[lost].scale
    assert 0.5 == math.frexp(scale)[0]
    limit = LARGEST * 2.0**-margin * (1 + 1e-6)
    assert scale * magnitude <= limit
    assert scale == 2.0**16 or scale * magnitude > limit / 2 * (1 - 1e-5)
    assert {float(scale)} == {float(state.scale) for state in states[lost:]}


@given(
    st.integers(-24, 31),
    st.integers(16, 40),
    st.integers(1, 8),
    st.integers(0, 12),
)
def test_the_tries_reach_from_any_first_scale_to_one(exponent, first, tries, margin):
    """A magnitude that fits at a scale of 1 is found by the tries, wherever it is."""
    magnitude = 1.9 * 2.0 ** min(exponent, 14 - margin)
    policy = AutoStart(Dynamic(init_scale=2.0**first), tries=tries, margin=margin)
    lost, states = start(policy, magnitude)
    assert lost <= tries
    scale = float(states[lost].scale)
    limit = LARGEST * 2.0**-margin
    assert scale * magnitude <= limit
    # The margin is used up to a doubling, unless even the first scale fits.
    assert scale == 2.0**first or 2 * scale * magnitude > limit
    assert {scale} == {float(state.scale) for state in states[lost:]}


@given(
    st.integers(0, 100),
    st.integers(1, 12),
    st.none() | st.integers(1, 20),
    st.floats(2.0**-20, 1.0, width=32),
)
def test_after_the_tries_every_overflow_is_the_rule_s(first, tries, jump, floor):
    rule = Dynamic(init_scale=2.0**first, min_scale=floor)
    policy = AutoStart(rule, tries=tries, jump=jump)
    state, scales = ls.init(policy), []
    for _ in range(tries + 3):
        before = state.scale
        state = ls.update(policy, state, Signal(False, amax=np.float32(0)))
        assert floor <= state.scale <= before
        scales.append(float(before / state.scale))
    # Never more jumps than tries; what comes after them halves, or stays at the floor.
    assert sum(ratio > 2.0 for ratio in scales) <= tries
    assert all(ratio <= 2.0 for ratio in scales[tries:])


def test_from_megatron_s_first_scale_four_tries_lead_to_one():
    policy = AutoStart(Dynamic(init_scale=2.0**32))
    state, scales = ls.init(policy), []
    for _ in range(5):
        state = ls.update(policy, state, Signal(False))
        scales.append(float(state.scale))
    assert [2.0**24, 2.0**16, 2.0**8, 1.0, 0.5] == scales


def test_a_default_jump_is_found_again_for_another_rule():
    policy = AutoStart()
    other = replace(policy, rule=Dynamic(init_scale=2.0**32))
    assert AutoStart(Dynamic(init_scale=2.0**32)) == other
    assert policy.jump is other.jump is None
    assert other == pickle.loads(pickle.dumps(other))  # noqa: S301
    assert other.step(other.init(), Signal(False), where=pick).scale == 2.0**24


def test_the_rule_loses_up_to_sixteen_batches_where_the_start_tries_four_times():
    lost_by_rule, _ = start(Dynamic(), 60000.0)
    lost, _ = start(AutoStart(), 60000.0)
    assert (16, 4) == (lost_by_rule, lost)


def test_a_first_scale_that_fits_is_lowered_by_no_overflow():
    lost, states = start(AutoStart(), 0.25)
    assert 0 == lost
    assert 2.0**14 == states[0].scale  # 0.25 * 2**14 is below 65504 / 8, twice is not
    lost, states = start(AutoStart(), 1e-3)
    assert (0, 2.0**16) == (lost, states[0].scale)


def test_an_overflow_inside_the_network_leaves_the_scale_that_was_finite():
    # The weights' gradients would fit at 2**16: they say nothing about the overflow.
    lost, states = start(AutoStart(), 2.0**-6, inside=16.0)
    assert 2 == lost
    assert {256.0} == {float(state.scale) for state in states[2:]}


def test_a_bad_batch_lowers_no_scale_once_a_good_one_was_seen():
    policy = AutoStart()
    state = ls.init(policy)
    scales = []
    for _ in range(5):
        state = ls.update(policy, state, Signal(False, amax=np.float32(0)))
        scales.append(float(state.scale))
    assert [2.0**12, 2.0**8, 2.0**4, 1.0, 0.5] == scales
    amax = np.float32(2.0**-8) * state.scale
    state = ls.update(policy, state, Signal(True, amax=amax))
    assert 2.0**16 == state.scale


def test_gradients_that_are_all_zero_do_not_end_the_search():
    policy = AutoStart()
    state = ls.update(policy, ls.init(policy), Signal(True, amax=np.float32(0)))
    assert policy.is_starting(state)
    assert 2.0**16 == state.scale


def test_without_a_measurement_the_first_finite_step_ends_the_search():
    policy = AutoStart()
    state = ls.update(policy, ls.init(policy), Signal(False))
    assert policy.is_starting(state)
    state = ls.update(policy, state, Signal(True))
    assert not policy.is_starting(state)
    assert 2.0**12 == state.scale


@given(rules(), st.lists(st.booleans(), min_size=1, max_size=40))
def test_after_the_start_the_rule_decides_alone(rule, flags):
    policy = AutoStart(rule)
    state = ls.init(policy)._replace(overflowed=np.float32(0))
    ruled = ls.init(rule)
    for flag in flags:
        state = ls.update(policy, state, Signal(flag, amax=np.float32(9e4)))
        ruled = ls.update(rule, ruled, Signal(flag))
        assert tuple(ruled) == tuple(state[:3])


def test_tries_are_no_overflows_that_a_hysteresis_counts():
    policy = AutoStart(Dynamic(hysteresis=2))
    state = ls.update(policy, ls.init(policy), Signal(False))
    assert (2.0**12, 0) == (state.scale, state.bad_steps)


def test_no_jump_leads_below_the_rule_s_floor():
    policy = AutoStart(Dynamic(min_scale=300.0))
    state, scales = ls.init(policy), []
    for _ in range(5):
        state = ls.update(policy, state, Signal(False))
        scales.append(float(state.scale))
    assert [4096.0, 2048.0, 1024.0, 512.0, 300.0] == scales


def test_a_loss_that_is_not_finite_leaves_the_search_if_the_rule_says_so():
    policy = AutoStart(Dynamic(hold_on_nonfinite_loss=True))
    before = ls.init(policy)
    assert before == ls.update(policy, before, Signal(False, loss_finite=False))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"margin": -1}, "margin must be a number from 0 to 32"),
        ({"jump": 0}, "jump must be a whole number of doublings"),
        ({"tries": 0}, "tries must be a whole number of tries"),
        ({"tries": 2.5}, "tries must be a whole number"),
        ({"jump": 100, "tries": 3}, "at most 252 doublings, got 100 * 3"),
        ({"tries": 64}, "at most 252 doublings, got 4 * 64"),
        ({"largest": -1.0}, "positive"),
        ({"rule": 8.0}, "Write AutoStart(rule=Dynamic(init_scale=8.0))."),
    ],
)
def test_a_wrong_setting_is_refused(settings, words):
    with pytest.raises((SettingError, SettingTypeError)) as caught:
        AutoStart(**settings)
    assert words in str(caught.value)


def test_dynamic_says_what_to_type_for_an_automatic_start():
    with pytest.raises(SettingTypeError, match=r"AutoStart\(\)"):
        Dynamic(init_scale="auto")
