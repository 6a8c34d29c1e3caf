"""The policies that see more than a flag: invariants, originals, settings, files."""

import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from helpers.policies import policies as rules
from hypothesis import given
from hypothesis import strategies as st

import lossscale.numpy as ls
from lossscale import (
    AboveEdge,
    AutoStart,
    Dynamic,
    Headroom,
    Histogram,
    LogMax,
    OverflowRate,
    Policy,
    RisingFloor,
    Saturation,
    ScaleState,
    Signal,
    WindowFollowsScale,
    from_portable,
    load,
    save,
    to_portable,
)
from lossscale.core.data_policies import octaves
from lossscale.core.state import is_state
from lossscale.errors import LossScaleError, SettingError, SettingTypeError, StateError
from lossscale.presets import PRESETS

KINDS = [
    Headroom,
    LogMax,
    Histogram,
    Saturation,
    OverflowRate,
    WindowFollowsScale,
    RisingFloor,
    AutoStart,
]
MEASURING = [Headroom, LogMax, Histogram, Saturation]


def make(kind, rule):
    """Return a policy of a kind with a rule, with short windows."""
    if kind is RisingFloor:
        top = rule.max_scale
        return RisingFloor(rule, floors=((3, min(64.0, top)), (9, min(4096.0, top))))
    if kind is WindowFollowsScale:
        return WindowFollowsScale(replace(rule, growth_delay="never"))
    short = {
        Headroom: {"window": 4},
        LogMax: {"window": 4, "patience": 2},
        Histogram: {"period": 2},
        Saturation: {"doubling": 3},
        OverflowRate: {"tolerance": 0.3},
        AutoStart: {"tries": 2},
    }
    return kind(rule, **short[kind])


magnitudes = (
    st.floats(0.0, 65504.0, width=32)
    | st.sampled_from([0.0, 1e-45, 2.0**-126, 3.4e38, 1e300, math.inf])
    | st.none()
)
steps = st.lists(st.tuples(st.booleans(), magnitudes), min_size=1, max_size=60)


def walk(policy, observed):
    """Yield each step's flag and the states before and after it."""
    state = ls.init(policy)
    for finite, amax in observed:
        after = ls.update(policy, state, Signal(finite, amax=amax))
        yield finite, state, after
        state = after


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(rule=rules(), observed=steps)
def test_the_scale_stays_finite_positive_and_within_bounds(kind, rule, observed):
    policy = make(kind, rule)
    low, high = np.float32(rule.min_scale), np.float32(rule.max_scale)
    for _, _, after in walk(policy, observed):
        assert low <= after.scale <= high
        assert np.isfinite(after.scale)
        assert np.isfinite(np.float32(1) / after.scale)
        assert all(np.isfinite(value) for value in after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(rule=rules(), observed=steps)
def test_an_overflow_never_raises_the_scale(kind, rule, observed):
    for finite, before, after in walk(make(kind, rule), observed):
        assert finite or after.scale <= before.scale


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Saturation])
@given(rule=rules(powers_of_two=True), observed=steps)
def test_a_power_of_two_stays_one(kind, rule, observed):
    bounds = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
    policy = make(kind, replace(rule, init_scale=1.0, **bounds))
    for _, _, after in walk(policy, observed):
        assert 0.5 == math.frexp(after.scale)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(rule=rules(), observed=steps)
def test_dtypes_and_the_type_of_the_state_stay(kind, rule, observed):
    policy = make(kind, rule)
    for _, before, after in walk(policy, observed):
        assert is_state(after)
        assert type(policy.init()) is type(after)
        assert [v.dtype for v in before] == [v.dtype for v in after]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(rule=rules(), observed=steps)
def test_a_vector_of_scales_is_many_scales(kind, rule, observed):
    policy = make(kind, rule)
    observed = [(finite, amax or 0.0) for finite, amax in observed]
    single = [ls.init(policy), ls.init(policy)]
    vector = type(single[0])(*(np.stack([v, v]) for v in single[0]))
    for finite, amax in observed:
        pairs = [(finite, amax), (not finite, amax * 0.125)]
        single = [
            ls.update(policy, state, Signal(flag, amax=top))
            for state, (flag, top) in zip(single, pairs, strict=True)
        ]
        flags, amaxes = map(np.array, zip(*pairs, strict=True))
        vector = ls.update(policy, vector, Signal(flags, amax=amaxes))
        for index, state in enumerate(single):
            assert state == type(state)(*(value[index] for value in vector))


@pytest.mark.parametrize("kind", MEASURING)
@given(rule=rules(), flags=st.lists(st.booleans(), min_size=1, max_size=40))
def test_without_a_measurement_the_rule_decides(kind, rule, flags):
    policy, state, ruled = make(kind, rule), None, ls.init(rule)
    state = ls.init(policy)
    for flag in flags:
        state = ls.update(policy, state, Signal(flag))
        ruled = ls.update(rule, ruled, Signal(flag))
        assert tuple(ruled) == tuple(state[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_too_large_leaves_the_state(kind):
    policy = make(kind, Dynamic())
    before = ls.init(policy)
    signal = Signal(False, amax=np.float32(3e38), too_large=True)
    assert before == ls.update(policy, before, signal)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_not_finite_leaves_the_state_if_the_rule_says_so(kind):
    policy = make(kind, Dynamic(hold_on_nonfinite_loss=True))
    before = ls.init(policy)
    for amax in (None, np.float32(4.0)):
        signal = Signal(False, amax=amax, loss_finite=False)
        assert before == ls.update(policy, before, signal)


class TestHeadroom:
    def scales(self, policy, observed):
        return [after.scale for _, _, after in walk(policy, observed)]

    def test_it_rises_one_doubling_per_step_up_to_the_margin(self):
        policy = Headroom(Dynamic(init_scale=1.0), margin=3)
        state = ls.init(policy)
        scales = []
        for _ in range(20):  # the true magnitude is 2: 2 * 4096 > 65504 / 8
            signal = Signal(True, amax=np.float32(2.0) * state.scale)
            state = ls.update(policy, state, signal)
            scales.append(float(state.scale))
        assert [2.0**k for k in range(1, 12)] + [2048.0] * 9 == scales

    def test_it_falls_in_one_step_as_far_as_it_must(self):
        policy = Headroom(Dynamic(init_scale=2.0**20), margin=2)
        (scale,) = self.scales(policy, [(True, 2.0**30)])
        # 2**30 / 2**20 * scale <= 65504 / 4: the largest power of two is 8.
        assert 8.0 == scale

    def test_after_an_overflow_it_does_not_return_within_the_window(self):
        policy = Headroom(Dynamic(init_scale=1024.0), margin=0, window=10)
        observed = [(False, 0.5)] + [(True, 0.5)] * 40
        scales = self.scales(policy, observed)
        assert [512.0] * 10 == scales[:10]
        assert 1024.0 <= max(scales[20:])

    def test_a_large_magnitude_is_forgotten_after_two_windows_at_most(self):
        policy = Headroom(Dynamic(init_scale=1.0), margin=0, window=5)
        scales = self.scales(policy, [(True, 60000.0)] + [(True, 1.0)] * 10)
        assert {1.0} == set(scales[:9])
        assert 2.0 == scales[-1]

    def test_while_all_gradients_are_zero_the_rule_raises_the_scale(self):
        policy = Headroom(Dynamic(init_scale=1.0, growth_interval=3))
        assert [1.0, 1.0, 2.0] == self.scales(policy, [(True, 0.0)] * 3)

    def test_a_run_at_its_scale_skips_nothing_where_dynamic_climbs_into_overflows(self):
        rng = np.random.default_rng(0)
        true = rng.lognormal(-4, 0.5, 3000).astype(np.float32)

        def skipped(policy):
            state, count = ls.init(policy), 0
            for magnitude in true:
                amax = np.float32(magnitude) * state.scale
                finite = amax <= 65504
                count += not finite
                state = ls.update(policy, state, Signal(finite, amax=min(amax, 65504)))
            return count

        rule = Dynamic(growth_interval=100)
        assert 0 == skipped(Headroom(rule))
        assert 10 < skipped(rule)


def published_log_max(observed):
    """The formula as OpenSeq2Seq has it, in float64: yields the scale of every step."""
    fast = slow = square = 0.0
    fast_left = slow_left = 1.0
    for finite, magnitude in observed:
        x = math.log2(magnitude) if finite else 2.0**16
        fast, fast_left = 0.99 * fast + 0.01 * x, 0.99 * fast_left
        slow, slow_left = 0.999 * slow + 0.001 * x, 0.999 * slow_left
        square = 0.999 * square + 0.001 * x * x
        mean, slow_mean = fast / (1 - fast_left), slow / (1 - slow_left)
        spread = math.sqrt(max(square / (1 - slow_left) - slow_mean**2, 0.0))
        exponent = 16.0 - (mean + 3.09 * spread)
        yield 2.0 ** max(0.0, min(exponent, 24.0))


class TestLogMax:
    def run(self, policy, observed):
        """Yield the scale after every step of true magnitudes."""
        state = ls.init(policy)
        for finite, magnitude in observed:
            amax = np.float32(magnitude) * state.scale
            state = ls.update(policy, state, Signal(finite, amax=amax))
            yield float(state.scale)

    def test_it_settles_where_the_published_formula_does(self):
        rng = np.random.default_rng(1)
        observed = [(True, float(m)) for m in 2.0 ** rng.normal(-5, 1, 3000)]
        ours = list(self.run(LogMax(), observed))
        published = list(published_log_max(observed))
        # A power of two at or below, and a logarithm that is off by 0.09 at most.
        for own, original in zip(ours[1000:], published[1000:], strict=True):
            assert 0.4 * original <= own <= 1.2 * original

    def test_one_overflow_does_not_drop_the_scale_to_its_minimum(self):
        rng = np.random.default_rng(1)
        finite = [(True, float(m)) for m in 2.0 ** rng.normal(-5, 1, 1500)]
        observed = [*finite, (False, 2.0), *finite[:300]]
        published = list(published_log_max(observed))
        assert published[1499] > 2.0**16
        assert {1.0} == set(published[1500:])  # the defect: 300 steps later, still 1
        ours = list(self.run(LogMax(), observed))
        assert min(ours[1500:]) >= ours[1499] / 4
        assert ours[-1] >= ours[1499] / 2

    def test_an_overflow_counts_as_one_octave_above_what_fits(self):
        policy = LogMax(Dynamic(init_scale=65504.0))
        state = ls.update(policy, ls.init(policy), Signal(False, amax=np.float32(1)))
        assert (1.0, 1.0) == (state.mean, state.seen)

    def test_a_step_without_gradients_is_not_counted(self):
        policy = LogMax()
        state = ls.update(policy, ls.init(policy), Signal(True, amax=np.float32(0)))
        assert policy.init()[3:] == tuple(state[3:])
        assert 65536.0 == state.scale

    def test_it_rises_after_patience_only(self):
        scales = list(self.run(LogMax(patience=5), [(True, 1e-6)] * 7))
        assert [65536.0] * 4 + [2.0**17, 2.0**18, 2.0**19] == scales


class TestHistogram:
    def test_it_moves_once_a_period_by_the_edge(self):
        policy = Histogram(Dynamic(init_scale=8.0), period=2)
        amaxes = [1.0, 1.0, 9000.0, 1.0, 1.0, 1.0]
        scales = [
            after.scale for *_, after in walk(policy, [(True, t) for t in amaxes])
        ]
        assert [8.0, 16.0, 16.0, 8.0, 8.0, 16.0] == scales

    def test_a_measured_fraction_decides_before_the_largest_magnitude(self):
        policy = Histogram(period=1)
        for fraction, scale in ((1e-8, 2.0**17), (1e-6, 2.0**15)):
            signal = Signal(True, amax=np.float32(9e3), above_edge=np.float32(fraction))
            assert scale == ls.update(policy, ls.init(policy), signal).scale


class TestSaturation:
    def test_it_halves_at_the_maximum_and_doubles_in_a_thousand_steps(self):
        policy = Saturation(Dynamic(init_scale=64.0), edge=448.0)
        scales = [
            float(after.scale)
            for *_, after in walk(policy, [(True, 448.0)] + [(True, 1.0)] * 1000)
        ]
        assert 32.0 == scales[0]
        assert math.isclose(64.0, scales[-1], rel_tol=1e-4)


def fairseq(scale, window, tolerance, floor, flags):
    """What fairseq's scaler does, described by its counters: yields every scale."""
    overflow_at, moved_at, overflows = -1, -1, 0
    for now, finite in enumerate(flags):
        if finite:
            if (now - overflow_at) % window == 0:
                scale, moved_at = scale * 2, now
        else:
            overflow_at = now
            overflows += 1
            if overflows / (now - moved_at) >= tolerance:
                scale, moved_at, overflows = max(scale / 2, floor), now, 0
        yield scale


flag_lists = st.lists(st.integers(0, 9).map(bool), min_size=1, max_size=150)


@given(
    st.integers(1, 12),
    st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 1.0]),
    flag_lists,
)
def test_the_overflow_rate_moves_as_fairseq_does(window, tolerance, flags):
    rule = Dynamic(init_scale=2.0**15, growth_interval=window, min_scale=2.0**-20)
    policy = OverflowRate(rule, tolerance=tolerance)
    expected = list(fairseq(2.0**15, window, tolerance, 2.0**-20, flags))
    got = [float(after.scale) for *_, after in walk(policy, [(f, None) for f in flags])]
    assert expected == got


def metaseq(flags):
    """What metaseq's scaler does without a tolerance: yields every scale."""
    scale, window, floor, overflow_at = 4.0, 256, 2.0**-5, -1
    for now, finite in enumerate(flags):
        if finite:
            if (now - overflow_at) % window == 0:
                scale, window = scale * 2, window * 2
        else:
            overflow_at = now
            if scale / 2 >= floor:
                scale = scale / 2
            window = max(int(window / 2), 1)
        yield scale


def test_the_window_follows_the_scale_as_in_metaseq_after_each_overflow():
    # metaseq counts from the last overflow, modulo the window, and goes on shortening
    # it at the floor: above it and up to the first growth the two agree.
    policy = WindowFollowsScale()
    flags = [False] * 5 + [True] * 8 + [False] * 2 + [True] * 4
    got = [float(after.scale) for *_, after in walk(policy, [(f, None) for f in flags])]
    assert list(metaseq(flags)) == got


def test_each_doubling_takes_twice_as_long():
    policy = WindowFollowsScale()
    states = walk(policy, [(True, None)] * (256 + 512 + 1024))
    grew = [n for n, (_, old, new) in enumerate(states, 1) if new.scale > old.scale]
    assert [256, 256 + 512, 256 + 512 + 1024] == grew


def test_the_floor_rises_on_its_schedule():
    policy = RisingFloor(Dynamic(init_scale=8.0), floors=((3, 16.0), (5, 32.0)))
    flags = [False, False, True, False, False, True, False]
    scales = [after.scale for *_, after in walk(policy, [(f, None) for f in flags])]
    assert [4.0, 2.0, 16.0, 16.0, 16.0, 32.0, 32.0] == scales


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (Headroom, {"margin": -1}, "margin must be a number from 0 to 32"),
        (Headroom, {"window": 0}, "1 or more"),
        (Headroom, {"window": 10**7}, "at most 1,000,000 steps"),
        (Headroom, {"largest": 0.0}, "positive"),
        (Headroom, {"rule": 1024.0}, "rule must be a Dynamic"),
        (Headroom, {"rule": 8}, "Write Headroom(rule=Dynamic(init_scale=8.0))."),
        (Headroom, {"rule": Dynamic}, "Write Headroom(rule=Dynamic())."),
        (LogMax, {"rule": "torch"}, "Write LogMax(rule=presets.get('torch'))."),
        (LogMax, {"rule": PRESETS["torch"]}, "Write LogMax(rule=preset.policy)."),
        (Headroom, {"rule": math.nan}, "rule must be a Dynamic, got nan."),
        (LogMax, {"deviations": math.nan}, "deviations"),
        (LogMax, {"patience": 0}, "1 or more"),
        (Histogram, {"edge": -1.0}, "positive"),
        (Histogram, {"fraction": 2.0}, "from 0 to 1"),
        (Histogram, {"period": 1.5}, "whole number"),
        (Saturation, {"doubling": 0}, "1 or more"),
        (Saturation, {"fraction": "1"}, "from 0 to 1"),
        (OverflowRate, {"tolerance": -0.1}, "from 0 to 1"),
        (RisingFloor, {"floors": ()}, "pairs of a step and a scale"),
        (RisingFloor, {"floors": 3}, "pairs of a step and a scale"),
        (RisingFloor, {"floors": ((3, 8.0), (2, 16.0))}, "rise step by step"),
        (RisingFloor, {"floors": ((2**24, 8.0),)}, "over by step"),
        (RisingFloor, {"floors": ((1, 2.0**127),)}, "above max_scale"),
        (WindowFollowsScale, {"rule": Dynamic(growth_delay="first")}, "growth_delay"),
    ],
)
def test_a_wrong_setting_is_refused(kind, settings, words):
    with pytest.raises((SettingError, SettingTypeError)) as caught:
        kind(**settings)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_policy_that_is_hashable_and_can_be_pickled(kind):
    policy = kind()
    assert isinstance(policy, Policy)
    assert policy == pickle.loads(pickle.dumps(policy))  # noqa: S301
    assert hash(policy) == hash(kind())
    state = pickle.loads(pickle.dumps(policy.init()))  # noqa: S301
    assert policy.init() == state


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_through_a_file_and_continues_exactly(kind, tmp_path):
    policy = make(kind, Dynamic(growth_interval=3))
    observed = [(True, 900.0), (True, 40.0), (False, 7.0), (True, 50000.0)]
    *_, (_, _, state) = walk(policy, observed)
    save(tmp_path / "state.json", policy, state)
    same, plain = load(tmp_path / "state.json")
    assert policy == same
    assert state == ls.init(same, plain)
    assert json.loads((tmp_path / "state.json").read_text())["policy"]["rule"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_continues_from_the_three_numbers_of_another_policy(kind):
    policy = make(kind, Dynamic())
    state = ls.init(policy, ScaleState(32.0, 1, 0))
    assert (32.0, 1, 0) == tuple(state[:3])
    assert policy.init()[3:] == tuple(state[3:])
    plain = ls.init(Dynamic(), state)
    assert ScaleState(32.0, 1, 0) == plain


def test_a_malformed_memory_or_rule_is_one_error():
    policy = Headroom()
    good = to_portable(policy, policy.init())
    for where, name, value in (
        ("state", "peak", math.nan),
        ("state", "peak", "1"),
        ("state", "age", None),
        ("policy", "rule", 3),
        ("policy", "rule", {"init_scale": 8.0}),
        ("policy", "margin", -1),
    ):
        broken = json.loads(json.dumps(good))
        broken[where][name] = value
        with pytest.raises(StateError):
            from_portable(broken)
    del good["state"]["peak"]
    with pytest.raises(StateError, match="peak"):
        from_portable(good)


class TestOctaves:
    normal = st.floats(2.0**-126, 2.0**126, width=32)

    @pytest.mark.filterwarnings("ignore:overflow")
    @given(normal)
    def test_the_logarithm_is_within_a_tenth(self, value):
        got = octaves.log2(np.float32(value), np.where)
        assert -0.09 <= float(got) - math.log2(value) <= 1e-5

    @given(st.floats(1.0, 2.0**126, width=32))
    def test_rounding_up_gives_the_next_power(self, ratio):
        got = float(octaves.round_up_to_power(np.float32(ratio), np.where))
        assert 0.5 == math.frexp(got)[0]
        assert got / 2 < ratio <= got

    @given(st.integers(-(300 << 10), 300 << 10))
    def test_a_power_of_a_floor(self, fraction):
        exponent = fraction / 1024
        got = float(octaves.exp2_floor(np.float32(exponent), np.where))
        assert 2.0 ** max(-126, min(math.floor(exponent), 127)) == got

    @given(st.floats(2.0**-20, 2.0**14, width=32))
    def test_the_root(self, value):
        got = float(octaves.square_root(np.float32(value), np.where))
        assert math.isclose(math.sqrt(value), got, rel_tol=1e-6, abs_tol=2.0**-11)


def test_every_error_of_a_policy_is_one_of_ours():
    with pytest.raises(LossScaleError):
        Headroom(Dynamic(), margin=None)


def test_a_policy_with_an_edge_asks_for_the_fraction_above_it():
    assert ("amax", AboveEdge(0.125 * 65504.0)) == Histogram().wants
    assert ("amax", AboveEdge(448.0, inclusive=True)) == Saturation(edge=448).wants
    assert ("amax",) == Headroom().wants
    assert () == OverflowRate().wants


@pytest.mark.parametrize("edge", [0.0, -1.0, math.nan, math.inf, "8", None])
def test_an_edge_that_no_value_can_pass_is_refused(edge):
    with pytest.raises(LossScaleError, match="edge must be a positive"):
        AboveEdge(edge)


def test_an_edge_is_a_float32_number():
    assert float(np.float32(0.1)) == AboveEdge(0.1).edge
    with pytest.raises(SettingTypeError, match="inclusive must be True or False"):
        AboveEdge(1.0, inclusive=1)


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        ([AboveEdge(1.0), AboveEdge(2.0)], "got 2 edges"),
        (["above_edge"], r"above_edge.*lossscale.AboveEdge\(edge\)"),
    ],
)
def test_measurements_that_make_no_sense_are_refused(measure, words):
    with pytest.raises(SettingError, match=words):
        ls.unscale([np.float32([1.0])], ls.init(Dynamic()), measure=measure)
