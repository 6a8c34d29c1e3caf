"""Backtests: the recorded policy takes its record again; planted records are read."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lossscale.numpy as ls
from lossscale import (
    Dynamic,
    Fixed,
    Headroom,
    OverflowRate,
    RisingFloor,
    ScaleState,
    Signal,
    WindowFollowsScale,
    presets,
)
from lossscale.core.data_policies import LogMax
from lossscale.diagnostics import (
    Recorder,
    backtest,
    measure_tensors,
    read_run,
    recommend,
    simulate,
)
from lossscale.diagnostics.backtests.gap import find_gap
from lossscale.diagnostics.backtests.underflow import read_samples
from lossscale.errors import SettingTypeError, StateError

LARGEST = 65504.0


def record(path, policy, limits, *, measured=True, held=(), gap=0.0, **header):
    """Record a run whose steps are finite up to given scales, by stepping the policy.

    The gradients inside this network are `gap` bits larger than those of its weights.
    Returns the scale of every step and whether it was skipped.
    """
    state = ls.init(policy)
    scales, skipped = [], []
    options = {"writers": (), "alarms": None, "policy": policy} | header
    with Recorder(path, **options) as recorder:
        for step, limit in enumerate(limits):
            magnitude = LARGEST / limit * 2.0**-gap
            finite = bool(state.scale <= limit) and step not in held
            amax = np.float32(min(magnitude * float(state.scale), LARGEST))
            too_large = np.bool_(step in held)
            signal = Signal(np.bool_(finite), amax=amax, too_large=too_large)
            recorder.record(
                scale=state.scale,
                applied=finite,
                cause=None if finite else "headroom" if too_large else "inf",
                amax=amax / state.scale if measured and finite else None,
            )
            scales.append(float(state.scale))
            skipped.append(not finite)
            state = ls.update(policy, state, signal)
    return scales, skipped


RULES = st.builds(
    Dynamic,
    init_scale=st.sampled_from([1.0, 1024.0, 65536.0, 2.0**32]),
    growth_interval=st.integers(1, 12),
    growth_factor=st.sampled_from([2.0, 1.5]),
    backoff_factor=st.sampled_from([0.5, 0.7]),
    hysteresis=st.integers(1, 3),
    growth_delay=st.sampled_from(["never", "first", "always"]),
    backoff_resets_hysteresis=st.booleans(),
)
FLAG_POLICIES = st.one_of(
    RULES,
    st.sampled_from([4.0, 1024.0, 2.0**20]).map(Fixed),
    RULES.map(lambda rule: OverflowRate(rule=rule, tolerance=0.2)),
    st.integers(1, 9).map(
        lambda wait: WindowFollowsScale(Dynamic(init_scale=8.0, growth_interval=wait))
    ),
    RULES.map(lambda rule: RisingFloor(rule=rule, floors=((5, 2.0), (20, 64.0)))),
)
LIMITS = st.lists(st.integers(-4, 30).map(lambda bits: 1.3 * 2.0**bits), min_size=1)


@settings(max_examples=80)
@given(policy=FLAG_POLICIES, limits=LIMITS, measured=st.booleans(), data=st.data())
def test_the_recorded_policy_takes_the_recorded_steps_again(
    tmp_path_factory, policy, limits, measured, data
):
    held = data.draw(st.sets(st.integers(0, len(limits) - 1), max_size=3))
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    scales, skipped = record(path, policy, limits, measured=measured, held=held)
    (outcome,) = backtest(path, [policy]).outcomes.values()
    # Not only what is likely: every assumption agrees with what was recorded.
    assert (sum(skipped),) * 3 == outcome.skipped
    assert scales == outcome.scales.tolist()
    assert 1 == len(set(outcome.final_scale)) == len(set(outcome.median_scale))


def test_policies_that_read_magnitudes_take_them_again(tmp_path):
    # A record has six digits of a magnitude: enough where no comparison is a tie.
    limits = 1.3 * 2.0 ** np.random.default_rng(0).integers(10, 20, 300)
    for policy in (Headroom(window=20), LogMax(window=20)):
        path = tmp_path / f"{type(policy).__name__}.jsonl"
        scales, skipped = record(path, policy, limits)
        (outcome,) = backtest(path, [policy]).outcomes.values()
        assert sum(skipped) == outcome.skipped.likely
        assert scales == outcome.scales.tolist()


@settings(max_examples=30)
@given(policy=FLAG_POLICIES, other=FLAG_POLICIES, limits=LIMITS)
def test_estimates_lie_within_their_bounds(tmp_path_factory, policy, other, limits):
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    record(path, policy, limits)
    (outcome,) = backtest(path, [other]).outcomes.values()
    for estimate in (outcome.skipped, outcome.final_scale, outcome.median_scale):
        assert estimate.low <= estimate.likely <= estimate.high
    assert 0 <= outcome.skipped.low <= outcome.skipped.high <= len(limits)


def test_a_policy_is_predicted_from_the_record_of_another(tmp_path):
    limits = np.full(600, 1.5 * 2.0**14)
    others = {name: presets.get(name) for name in ("torch", "megatron", "deepspeed")}
    others["often"] = Dynamic(growth_interval=10)
    record(tmp_path / "run.jsonl", Dynamic(growth_interval=50), limits)
    found = backtest(tmp_path / "run.jsonl", others)
    magnitudes = LARGEST / limits
    real = simulate(list(others.values()), np.ones(600, bool), magnitudes=magnitudes)
    for outcome, expected in zip(found.outcomes.values(), real, strict=True):
        assert expected.skipped == outcome.skipped.likely
        assert float(expected.final.scale) == outcome.final_scale.likely
        assert expected.growths == outcome.growths
        assert expected.backoffs == outcome.backoffs


def test_overflows_inside_the_network_are_learned_from_the_record(tmp_path):
    limits = 1.2 * 2.0 ** np.random.default_rng(0).integers(14, 16, 600)
    path = tmp_path / "run.jsonl"
    _, skipped = record(path, Dynamic(growth_interval=20), limits, gap=4.0)
    assert sum(skipped) > 10
    found = backtest(path, [Fixed(2.0**13), Fixed(2.0**17)])
    low, high = found.outcomes.values()
    # The weights' gradients alone would fit at 2**17: they are 4 bits smaller.
    assert (0, 600) == (low.skipped.likely, high.skipped.likely)
    assert any(
        "gradients inside the network overflow first" in r for r in found.remarks
    )


def test_a_record_without_overflows_leaves_the_inside_open(tmp_path):
    record(tmp_path / "run.jsonl", Fixed(16.0), np.full(300, 2.0**16))
    found = backtest(tmp_path / "run.jsonl", [Fixed(2.0**10)])
    (outcome,) = found.outcomes.values()
    assert (0, 0, 300) == outcome.skipped
    assert any(r.startswith("No step overflowed") for r in found.remarks)


def test_the_gap_is_where_finite_steps_end_and_overflows_begin():
    gap = find_gap(np.array([3.4, 3.6, 5.0, 7.0]), np.array([-4.0, 1.0, 2.2, 3.0]))
    assert 3.0 < gap.likely < 3.4
    assert gap.least <= gap.likely <= gap.most
    assert 4 == gap.explained == gap.overflows


def test_unusual_batches_do_not_make_a_gap():
    finite = np.linspace(0.5, 6.0, 1_000)
    gap = find_gap(finite, np.array([2.0, 4.0, 5.0]))
    assert 0.0 == gap.likely


def record_plainly(path, rows, **options):
    with Recorder(path, writers=(), alarms=None, **options) as recorder:
        for row in rows:
            recorder.record(**row)


def finite_step(scale, amax=0.25):
    return {"scale": scale, "applied": True, "amax": amax, "loss": 1.0}


def skipped_step(scale, cause, loss=1.0):
    return {"scale": scale, "applied": False, "cause": cause, "loss": loss}


@pytest.mark.parametrize(
    ("skip", "after", "skipped"),
    [
        (skipped_step(1024.0, "inf"), 512.0, 0),
        (skipped_step(1024.0, "nan"), 512.0, 0),
        (skipped_step(1024.0, "nan"), 1024.0, 1),
        (skipped_step(1024.0, "inf", float("nan")), 512.0, 1),
        (skipped_step(1024.0, "inf", float("inf")), 512.0, 1),
        (skipped_step(1024.0, "loss"), 512.0, 1),
        (skipped_step(1024.0, "headroom"), 1024.0, 1),
        (skipped_step(1024.0, "not stepped"), 1024.0, 0),
    ],
)
def test_causes_that_no_scale_helps_are_skipped_at_every_scale(
    tmp_path, skip, after, skipped
):
    rows = [*[finite_step(1024.0)] * 5, skip, *[finite_step(after)] * 5]
    record_plainly(tmp_path / "run.jsonl", rows)
    (outcome,) = backtest(tmp_path / "run.jsonl", [Fixed(1.0)]).outcomes.values()
    assert skipped == outcome.skipped.likely


def test_a_step_that_is_too_large_for_the_optimizer_keeps_the_scale(tmp_path):
    rows = [finite_step(64.0), skipped_step(64.0, "headroom"), finite_step(64.0)]
    record_plainly(tmp_path / "run.jsonl", rows)
    (outcome,) = backtest(
        tmp_path / "run.jsonl", [Dynamic(growth_interval=2, init_scale=8.0)]
    ).outcomes.values()
    assert [8.0, 8.0, 8.0] == outcome.scales.tolist()
    assert 16.0 == outcome.final_scale.likely


def test_a_policy_that_holds_on_a_loss_holds(tmp_path):
    rows = [finite_step(64.0), skipped_step(64.0, "loss"), finite_step(64.0)]
    record_plainly(tmp_path / "run.jsonl", rows)
    policies = [Dynamic(hold_on_nonfinite_loss=True), Dynamic()]
    held, backed_off = backtest(tmp_path / "run.jsonl", policies).outcomes.values()
    assert (0, 1) == (held.backoffs, backed_off.backoffs)
    assert held.skipped.likely == backed_off.skipped.likely == 1


def test_magnitudes_that_are_missing_are_those_of_their_neighbours(tmp_path):
    rows = [finite_step(64.0, amax) for amax in (8.0, None, None, 8.0, 8.0)]
    record_plainly(tmp_path / "run.jsonl", rows)
    found = backtest(tmp_path / "run.jsonl", [Fixed(2.0**12), Fixed(2.0**14)])
    assert [0, 5] == [o.skipped.likely for o in found.outcomes.values()]
    assert any("3 of 5 finite steps" in remark for remark in found.remarks)


def test_without_magnitudes_overflows_are_not_independent_of_the_scale(tmp_path):
    limits = np.full(400, 1.5 * 2.0**12)
    path = tmp_path / "run.jsonl"
    record(path, Dynamic(growth_interval=20), limits, measured=False)
    found = backtest(path, [presets.get("torch"), Fixed(2.0**10)])
    torch, fixed = found.outcomes.values()
    assert 4 == torch.skipped.likely
    assert 2.0**12 == torch.final_scale.likely
    assert 0 == fixed.skipped.likely
    assert torch.headroom is None
    assert any("No largest magnitude was recorded" in r for r in found.remarks)


def test_without_magnitudes_policies_that_read_them_are_named(tmp_path):
    limits = np.full(200, 1.5 * 2.0**12)
    path = tmp_path / "run.jsonl"
    record(path, Dynamic(growth_interval=20), limits, measured=False)
    policies = {"plain": Dynamic(), "head": Headroom(), "log": LogMax()}
    found = backtest(path, policies)
    plain, *readers = found.outcomes.values()
    for outcome in readers:
        np.testing.assert_array_equal(plain.scales, outcome.scales)
    (remark,) = [text for text in found.remarks if "only their rule ran" in text]
    assert remark.startswith("head and log read magnitudes")
    measured = tmp_path / "measured.jsonl"
    record(measured, Dynamic(growth_interval=20), limits)
    assert not [r for r in backtest(measured, policies).remarks if "rule ran" in r]


def test_lost_values_are_those_of_gradients_stored_at_that_scale(tmp_path):
    rng = np.random.default_rng(0)
    true = rng.standard_normal(4_000) * 2.0 ** rng.integers(-30, -10, 4_000)
    scale = 2.0**10
    with Recorder(tmp_path / "run.jsonl", writers=(), names=["w"]) as recorder:
        recorder.record(scale=scale, applied=True, amax=0.01, step=1)
        stored = (true * scale).astype(np.float16)
        recorder.record_statistics(measure_tensors({"w": stored}), scale=scale)
    policies = {str(bits): Fixed(2.0**bits) for bits in (0, 4, 10, 14)}
    found = backtest(tmp_path / "run.jsonl", policies)
    for bits, outcome in found.outcomes.items():
        really = (true * 2.0 ** int(bits)).astype(np.float16) == 0
        known = really & (stored != 0)
        assert pytest.approx(known.mean(), abs=2e-3) == outcome.lost.known
        assert outcome.lost.known <= really.mean() <= outcome.lost.most + 2e-3
    assert outcome.lost.most == pytest.approx((stored == 0).mean())


def test_a_scale_between_two_powers_loses_at_most_what_is_said(tmp_path):
    true = 2.0 ** np.linspace(-24, -4, 2_000)
    with Recorder(tmp_path / "run.jsonl", writers=(), names=["w"]) as recorder:
        recorder.record(scale=1024.0, applied=True, step=1)
        stored = (true * 1024.0).astype(np.float16)
        recorder.record_statistics(measure_tensors({"w": stored}), scale=1024.0)
    (sample,) = read_samples(read_run(tmp_path / "run.jsonl"))
    for scale in (3.0, 1.7, 0.3):
        really = ((true * scale).astype(np.float16) == 0).mean()
        assert really <= sample.lost_at(scale).most


@dataclass(frozen=True)
class Halving:
    """A policy of someone's own, which takes one scale at a time."""

    def init(self):
        return ScaleState(1024.0, 0, 0)

    def step(self, state, signal, *, where):
        del where
        return state if signal.finite else state._replace(scale=state.scale / 2)


def test_a_policy_of_ones_own_is_tried(tmp_path):
    record(tmp_path / "run.jsonl", Dynamic(), np.full(20, 300.0))
    (outcome,) = backtest(tmp_path / "run.jsonl", [Halving()]).outcomes.values()
    assert 256.0 == outcome.final_scale.likely


def test_nothing_to_try_is_refused(tmp_path):
    record(tmp_path / "run.jsonl", Dynamic(), [2.0**20])
    record_plainly(tmp_path / "empty.jsonl", [])
    for wrong in ([], {}, "torch", ["torch"], 3, {"torch": "torch"}):
        with pytest.raises(SettingTypeError, match="policies must be policies"):
            backtest(tmp_path / "run.jsonl", wrong)
    for wrong, words in (
        ("torch", r"got 'torch'\. .*presets\.get\('torch'\)"),
        (Fixed(8.0), r"got Fixed\(scale=8\.0\)\. Write \[Fixed\(\.\.\.\)\]"),
        ([Dynamic], "got <class .*Dynamic'>"),
    ):
        with pytest.raises(SettingTypeError, match=words):
            backtest(tmp_path / "run.jsonl", wrong)
    with pytest.raises(StateError, match="holds no step"):
        backtest(tmp_path / "empty.jsonl", [Dynamic()])
    with pytest.raises(StateError, match="holds no step"):
        recommend(tmp_path / "empty.jsonl")


def test_policies_are_named_by_their_settings(tmp_path):
    record(tmp_path / "run.jsonl", Dynamic(), [2.0**20])
    policies = [Dynamic(growth_interval=7), Fixed(2.0**14), Headroom(margin=2.0)]
    assert [
        "Dynamic(growth_interval=7)",
        "Fixed(2.0**14)",
        "Headroom(margin=2.0)",
    ] == list(backtest(tmp_path / "run.jsonl", policies).outcomes)


# Recommendations from planted records, where the right answer is known.


def test_the_start_is_half_of_what_the_first_steps_allow(tmp_path):
    record(tmp_path / "run.jsonl", Fixed(1024.0), np.full(400, 1.1 * 2.0**15))
    found = recommend(tmp_path / "run.jsonl")
    assert 2.0**14 == found.policy.init().scale
    assert "the first 100 finite steps, 2^0.9 unscaled" in found.reasons[0]
    assert "2^15" in found.reasons[0]
    assert 0 == found.outcome.skipped.likely


def test_the_start_allows_for_the_inside_of_the_network(tmp_path):
    limits = 1.2 * 2.0 ** np.random.default_rng(0).integers(14, 16, 600)
    record(tmp_path / "run.jsonl", Dynamic(growth_interval=20), limits, gap=4.0)
    found = recommend(tmp_path / "run.jsonl")
    assert found.policy.init().scale <= 2.0**14
    assert "bits for the gradients inside the network" in found.reasons[0]


def test_a_long_interval_is_for_gradients_that_stay_as_they_are(tmp_path):
    limits = np.full(2_500, 1.5 * 2.0**14)
    record(tmp_path / "run.jsonl", Dynamic(growth_interval=50), limits)
    found = recommend(tmp_path / "run.jsonl")
    assert Dynamic(init_scale=2.0**13, growth_interval=5_000) == found.policy or (
        Dynamic(init_scale=2.0**13, growth_interval=2_000) == found.policy
    )
    assert found.outcome.skipped.likely < found.recorded.skipped.likely
    assert any("within 3 steps after a growth" in reason for reason in found.reasons)


def test_a_short_interval_is_for_gradients_that_vanish(tmp_path):
    """The limit rises by an octave in every 150 steps: 2,000 would fall far behind."""
    limits = 1.5 * 2.0 ** (10 + np.arange(3_000) // 150)
    record(tmp_path / "run.jsonl", Dynamic(init_scale=1024.0), limits)
    found = recommend(tmp_path / "run.jsonl")
    assert found.policy.growth_interval <= 200
    assert any("stayed too low" in reason for reason in found.reasons)


def test_headroom_is_recommended_where_it_saves_skips_for_certain(tmp_path):
    """The limit falls and rises by octaves: a rule meets it from above each time."""
    wave = 14 + np.round(5 * np.sin(np.arange(4_000) / 120.0))
    record(tmp_path / "run.jsonl", Dynamic(growth_interval=40), 1.5 * 2.0**wave)
    found = recommend(tmp_path / "run.jsonl")
    assert isinstance(found.policy, Headroom)
    assert found.outcome.skipped.high < found.recorded.skipped.likely
    assert "lossscale.Headroom(rule=lossscale.Dynamic(" in found.code


def test_too_short_a_record_gives_no_recommendation(tmp_path):
    record(tmp_path / "run.jsonl", Dynamic(), np.full(99, 2.0**20))
    found = recommend(tmp_path / "run.jsonl")
    assert (None, "") == (found.policy, found.code)
    assert "too short: it has 99 finite steps" in found.reasons[0]


def test_what_no_scale_helps_gives_no_recommendation(tmp_path):
    """Now and then, which raises no alarm."""
    rows = ([finite_step(64.0)] * 3 + [skipped_step(64.0, "loss")]) * 50
    record_plainly(tmp_path / "run.jsonl", rows)
    found = recommend(tmp_path / "run.jsonl")
    assert found.policy is None
    assert "50 of 200 steps" in found.reasons[0]


@pytest.mark.parametrize("cause", ["nan", "loss"])
def test_steps_after_an_alarm_are_left_out(tmp_path, cause):
    good = [finite_step(64.0, 1.0 + 1e-3 * i) for i in range(300)]
    bad = [skipped_step(64.0, cause, math.inf if cause == "loss" else 1.0)] * 10
    with Recorder(tmp_path / "run.jsonl", writers=()) as recorder:
        for row in good + bad:
            recorder.record(**row)
    found = recommend(tmp_path / "run.jsonl")
    assert 2.0**14 == found.policy.init().scale
    assert any("raised an alarm (nan)" in limit for limit in found.limits)


def test_without_magnitudes_the_start_is_what_the_run_bore(tmp_path):
    limits = np.full(500, 1.5 * 2.0**12)
    record(tmp_path / "run.jsonl", Dynamic(growth_interval=25), limits, measured=False)
    found = recommend(tmp_path / "run.jsonl")
    assert Dynamic(init_scale=2.0**12, growth_interval=100) == found.policy
    assert any("4 steps were skipped before" in reason for reason in found.reasons)
    assert any("No largest magnitude" in limit for limit in found.limits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wide_formats_need_no_scale(tmp_path, dtype):
    record(tmp_path / "run.jsonl", Fixed(1.0), np.full(200, 2.0**20), dtype=dtype)
    found = recommend(tmp_path / "run.jsonl")
    assert Fixed(1.0) == found.policy


def test_the_code_is_for_the_framework_of_the_record(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path, Fixed(1024.0), np.full(200, 2.0**20))
    run = read_run(path)
    versions = {
        ("torch",): "GradScaler(",
        ("torch", "keras", "transformers"): "GradScaler(",
        ("torch", "keras"): "lossscale.keras",
        ("tensorflow",): "lossscale.tensorflow.init(policy)",
        ("jax", "optax"): "loss_scaled(",
        ("jax",): "lossscale.jax.init(policy)",
        (): "lossscale.numpy",
    }
    for names, expected in versions.items():
        run.header["versions"] = dict.fromkeys(names, "1.0")
        assert expected in recommend(run).code


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
def test_the_code_makes_the_policy(tmp_path):
    record(tmp_path / "run.jsonl", Fixed(1024.0), np.full(200, 2.0**20))
    found = recommend(tmp_path / "run.jsonl")
    names = {}
    exec(found.code, names)  # noqa: S102  # that is what the code is for
    assert found.policy == names["policy"]


def test_policies_do_not_share_what_they_remember(tmp_path):
    limits = 2.0 ** np.random.default_rng(1).integers(8, 18, 200)
    record(tmp_path / "run.jsonl", Dynamic(), limits)
    alone = {}
    policies = [Headroom(), LogMax(), Dynamic(growth_interval=9)]
    for policy in policies:
        alone |= backtest(tmp_path / "run.jsonl", [policy]).outcomes
    for order in itertools.permutations(policies):
        for name, outcome in backtest(tmp_path / "run.jsonl", order).outcomes.items():
            assert alone[name].skipped == outcome.skipped
            assert alone[name].scales.tolist() == outcome.scales.tolist()
