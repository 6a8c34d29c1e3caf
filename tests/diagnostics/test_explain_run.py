"""`explain_run`: what it says of recorded runs whose every step is known."""

import json
import math

import numpy as np
import pytest

import lossscale.numpy as ls
from lossscale import Dynamic
from lossscale.diagnostics import Recorder, explain_run, measure_tensors
from lossscale.errors import SettingError, SettingTypeError
from lossscale.testing.numpy import inject

NAMES = ["['embed']", "['middle']", "['head']"]
LIMITS = "A record cannot show activations"


def record(path, rows, **settings):
    """Record steps: each row is what `Recorder.record` is given."""
    options = {"names": NAMES, "policy": Dynamic(), "writers": (), "alarms": None}
    with Recorder(path, **(options | settings)) as recorder:
        for row in rows:
            recorder.record(**({"applied": True, "scale": 1024.0, "loss": 2.0} | row))
    return path


def bad(cause="inf", **more):
    return {"applied": False, "cause": cause, **more}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_of_a_real_loop_is_found_with_its_bracket(path, name):
    policy, rng = Dynamic(init_scale=1024.0), np.random.default_rng(0)
    state = ls.init(policy)
    with Recorder(path, names=NAMES, policy=policy, writers=()) as recorder:
        for step in range(1, 21):
            stored = {
                key: (rng.standard_normal(8) * float(state.scale)).astype(np.float16)
                for key in ("embed", "middle", "head")
            }
            stored = inject(stored, name, "inf", step=step, steps=13)
            _, signal = ls.unscale(stored, state, measure=("nan", "amax", "norm"))
            bad = [f"['{k}']" for k, g in stored.items() if not np.isfinite(g).all()]
            recorder.record_signal(
                state, signal, loss=2.0, nonfinite=dict.fromkeys(bad, "inf")
            )
            state = ls.update(policy, state, signal)
    seen = explain_run(path)
    place = NAMES.index(name) + 1
    nearest = NAMES[place] if place < len(NAMES) else None
    assert (13, "inf", name, nearest) == (
        seen.step,
        seen.cause,
        seen.broken_first,
        seen.nearest_finite,
    )
    assert (1024.0, (14, 512.0)) == (seen.scale, tuple(seen.recovery))
    assert (True, True, 12) == (
        seen.lower_scale_helped,
        seen.loss_finite,
        seen.last_good_step,
    )
    text = str(seen)
    assert "it broke between these two" in text
    assert "then step 14 was applied at a scale of 512" in text
    assert text.splitlines()[-1].startswith(LIMITS)


def test_nan_without_an_infinity_is_not_a_matter_of_the_scale(path):
    rows = [{}, bad("nan", nonfinite={NAMES[1]: "nan"}), {"scale": 512.0}]
    seen = explain_run(record(path, rows))
    assert seen.only_nan
    assert "lower scale cannot help" in str(seen)
    assert "which does not explain it" in str(seen)


def test_nan_with_an_infinity_may_follow_from_it(path):
    rows = [{}, bad("nan", nonfinite={NAMES[0]: "nan", NAMES[1]: "inf"}), {}]
    seen = explain_run(record(path, rows))
    assert not seen.only_nan
    assert NAMES[1] == seen.broken_first
    assert "inf - inf" in str(seen)
    assert "the scale was not lower, so the cause was in the batch" in str(seen)


def test_a_loss_that_is_not_finite_is_said(path):
    seen = explain_run(record(path, [{}, bad("loss", loss=float("nan")), {}]))
    assert seen.loss_finite is False
    assert "The loss of the step was NaN" in str(seen)
    assert json.dumps(seen.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "values",
    [
        {"cause": "loss"},
        {"cause": "loss", "loss": math.inf},
        {"cause": "inf", "loss": math.nan},
        {"cause": "nan", "nonfinite": {"a": "nan"}},
    ],
)
def test_what_no_scale_explains_is_not_said_of_the_gradients_later(path, values):
    """The scale came back, which says nothing about a loss that was not finite."""
    rows = [{}, bad(**values), {"scale": 512.0}, {"scale": 1024.0}]
    seen = explain_run(record(path, rows))
    assert (True, 4) == (seen.lower_scale_helped, seen.same_scale_again)
    assert "it was another batch" in str(seen)
    assert "for a while only" not in str(seen)


def test_the_headroom_before_is_compared(path):
    growing = [{"amax": 2.0 ** (step / 4 - 6)} for step in range(40)]
    seen = explain_run(record(path, [*growing, bad()]))
    assert "The headroom had been falling" in str(seen)
    # log2(65504) - 10 + 6, at the first step.
    largest = np.log2(65504) - 10 - 39 / 4 + 6
    assert seen.trend.lowest == pytest.approx(largest, rel=1e-4)  # five digits
    assert "No step was applied after it: One step was skipped" in str(seen)


def test_steady_headroom_gives_no_warning(path):
    seen = explain_run(record(path, [*[{"amax": 1.0}] * 20, bad()]))
    assert "The headroom gave no warning" in str(seen)


def test_the_last_statistics_of_the_tensor_are_used(path):
    with Recorder(path, names=NAMES, statistics_every=1, writers=()) as recorder:
        recorder.record(scale=8.0, applied=True, step=1)
        stored = {name: np.array([2.0], np.float16) for name in NAMES}
        recorder.record_statistics(measure_tensors(stored), scale=8.0)
        recorder.record(scale=8.0, **bad(nonfinite={NAMES[2]: "inf"}), step=2)
    seen = explain_run(path)
    assert (1, pytest.approx(np.log2(65504) - 1)) == tuple(seen.sample)
    assert "is the last tensor of the model" in str(seen)


def test_skips_in_a_row_and_the_same_scale_again_are_counted(path):
    rows = [{}, bad(), bad(scale=512.0), {"scale": 256.0}, {"scale": 1024.0}]
    seen = explain_run(record(path, rows))
    assert (2, (4, 256.0), 5) == (
        seen.skips_in_a_row,
        tuple(seen.recovery),
        seen.same_scale_again,
    )
    assert "2 steps in a row were skipped" in str(seen)


def test_the_step_that_led_to_the_alarm_is_explained(path):
    rows = [bad(), *[{}] * 300, *[bad("nan", nonfinite={NAMES[0]: "nan"})] * 5]
    record(path, rows, alarms=None)
    seen = explain_run(path)
    # No step after 301 was finite, so its weights may be the cause.
    assert ("nan", 304) == (seen.alarm, seen.alarm_step)
    assert (302, 1, 300) == (seen.step, seen.first_skipped, seen.last_good_step)
    assert "It is not the first" in str(seen)
    assert 1 == explain_run(path, step=1).step


def test_the_streak_that_ends_at_the_alarm_is_explained(path):
    """An overflow before it was followed by a step that was applied: it is another."""
    nan = dict.fromkeys(NAMES, "nan")
    rows = [{}] * 149
    rows += [bad(nonfinite={NAMES[1]: "inf"}), {"scale": 512.0}]
    rows += [bad("loss", scale=512.0, loss=None, nonfinite=nan)] * 5
    seen = explain_run(record(path, rows))
    assert ("nan", 154, 149) == (seen.alarm, seen.alarm_step, seen.last_good_step)
    assert (152, "loss", 150, False) == (
        seen.step,
        seen.cause,
        seen.first_skipped,
        seen.loss_finite,
    )
    text = str(seen)
    assert "The loss of the step was not finite." in text
    # The loss broke, no layer: and that it did is in the record.
    assert "it broke between these two" not in text
    assert "the loss" not in text.partition("The record does not have")[2]


def test_an_infinity_just_before_a_streak_of_nan_is_not_part_of_it(path):
    rows = [{}] * 30 + [bad(nonfinite={NAMES[1]: "inf"})]
    rows += [bad("nan", scale=512.0, nonfinite={NAMES[0]: "nan"})] * 3
    seen = explain_run(record(path, rows))
    assert ("nan", 34, 32) == (seen.alarm, seen.alarm_step, seen.step)


def test_back_offs_are_explained_by_the_last_of_them(path):
    """The alarm is raised by the step after the last overflow, which was applied."""
    rows, scale = [{}] * 20, 1024.0
    for _ in range(4):
        rows += [bad(scale=scale), *[{"scale": scale / 2}] * 9]
        scale /= 2
    seen = explain_run(record(path, rows))
    assert ("back-offs", 52, 51) == (seen.alarm, seen.alarm_step, seen.step)


def test_a_run_without_skips_has_nothing_to_explain(path):
    seen = explain_run(record(path, [{}, {}]))
    assert seen.step is None
    assert "No step of this run was skipped: there is nothing to explain." == str(seen)


def test_what_is_missing_in_the_record_is_said(path):
    seen = explain_run(record(path, [bad(loss=None)], names=()))
    words = "does not have names of tensors (give the recorder names=), largest"
    assert words in str(seen)
    assert seen.last_good_step is None
    assert "No step before it is known" in str(seen)


def test_a_name_stays_in_its_line(path):
    name = "a\nb\x0c"
    rows = [bad(nonfinite={name: "inf"})]
    seen = explain_run(record(path, rows, names=[name]))
    assert "a b (inf)" in str(seen)


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (1, SettingError, "was applied, so there is nothing to explain.*--step 2"),
        (3, SettingError, "There is no step 3.*steps 1 to 2"),
        ("2", SettingTypeError, "number of a step"),
        (True, SettingTypeError, "number of a step"),
    ],
)
def test_a_step_that_cannot_be_explained_is_one_error(path, step, error, words):
    record(path, [{}, bad()])
    with pytest.raises(error, match=words):
        explain_run(path, step=step)
