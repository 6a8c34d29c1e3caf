"""Alarms: what raises each, what does not, and which step they call good."""

import math
import random

import pytest

from lossscale import Dynamic, Fixed
from lossscale.diagnostics import AlarmRules, Recorder, StepRecord, read_run
from lossscale.diagnostics.alarms import KINDS, AlarmMonitor, scan
from lossscale.diagnostics.records.layout import describe_policy
from lossscale.errors import SettingError, SettingTypeError

POLICY = describe_policy(Dynamic(growth_interval=100))


def step(number, scale=1024.0, **values):
    return StepRecord(number, 0.0, scale, **values)


def skip(number, scale=1024.0, cause="inf", **values):
    return StepRecord(number, 0.0, scale, applied=False, cause=cause, **values)


def healthy(first, last, scale=1024.0, **values):
    return [step(number, scale, **values) for number in range(first, last + 1)]


def alarms(records, policy=POLICY, **rules):
    return list(scan(records, AlarmRules(**rules), policy=policy))


def backing_off(count, every=10, loss=2.0):
    """Return a run that finds its scale, and then lowers its scale so many times."""
    records, scale, number = healthy(1, 50, loss=loss), 1024.0, 50
    for _ in range(count):
        records.append(skip(number + 1, scale, loss=loss, nonfinite=(("a", "inf"),)))
        scale /= 2
        records += healthy(number + 2, number + every, scale, loss=loss)
        number += every
    return records


def test_several_back_offs_with_a_finite_loss():
    assert [] == alarms(backing_off(3))
    (alarm,) = alarms(backing_off(4))
    assert ("back-offs", 82, ("a",)) == (alarm.kind, alarm.step, alarm.names)
    assert "4 times within" in alarm.message
    assert "from 1,024 to 64" in alarm.message
    assert "growing faster than the scale can follow" in alarm.message


def test_growths_in_between_count_against_back_offs_and_are_named():
    records, number = healthy(1, 50), 50
    for scale in (1024.0, 1024.0, 1024.0, 4096.0):  # raised before each of the last 3
        records.append(skip(number + 1, scale, nonfinite=(("a", "inf"),)))
        records += healthy(number + 2, number + 9, scale / 2)
        number += 9
    assert [] == alarms(records)
    for scale in (2048.0, 1024.0, 512.0):
        records.append(skip(number + 1, scale, nonfinite=(("a", "inf"),)))
        records += healthy(number + 2, number + 5, scale / 2)
        number += 5
    (alarm,) = alarms(records)
    text = "lowered 7 times within 48 steps, and raised 3 times in between, from 1,024"
    assert f"{text} to 256" in alarm.message


def test_the_last_good_step_is_the_one_before_the_first_back_off():
    (alarm,) = alarms(backing_off(4))
    assert 50 == alarm.last_good_step


def test_back_offs_that_are_far_apart_are_healthy():
    assert [] == alarms(backing_off(8, every=60))


def growing_and_backing_off(count, interval=20):
    """Return a run that overflows after each of so many growths, and goes on."""
    records, number = healthy(1, 50), 50
    for _ in range(count):
        records.append(skip(number + 1, 2048.0, nonfinite=(("a", "inf"),)))
        records += healthy(number + 2, number + interval)
        number += interval
    return records


@pytest.mark.parametrize("policy", [None, describe_policy(Dynamic(growth_interval=20))])
def test_back_offs_that_follow_growths_are_healthy(policy):
    assert [] == alarms(growing_and_backing_off(20), policy=policy)


def test_the_noise_of_a_few_losses_is_no_rise():
    """With a growth interval of 4, two losses would make the half of a window."""
    policy = describe_policy(Dynamic(growth_interval=4))
    records = healthy(1, 120, loss=2.0)
    records += [skip(121, 1024.0, loss=2.0), skip(122, 512.0, loss=4.0)]
    records += healthy(123, 130, 256.0, loss=4.0)
    assert [] == alarms(records, policy=policy)


def test_a_nan_loss_of_applied_steps_is_an_alarm():
    """The last steps that are good are those before the one that broke the weights."""
    records = healthy(1, 30, loss=1.0) + healthy(31, 33, loss=float("nan"))
    (alarm,) = alarms(records)
    assert ("nan", 33, 29) == (alarm.kind, alarm.step, alarm.last_good_step)
    assert "The loss was NaN for 3 steps in a row" in alarm.message
    assert [] == alarms(records[:-1])


INFINITE = {
    "skipped for the loss": ({"cause": "loss", "loss": -math.inf}, "infinite"),
    "skipped for the gradients": ({"cause": "inf", "loss": math.inf}, "infinite"),
    "not recorded": ({"cause": "loss"}, "not finite"),
    "NaN": ({"cause": "loss", "loss": math.nan}, "NaN"),
}


@pytest.mark.parametrize("kind", INFINITE)
@pytest.mark.parametrize("scale", [1024.0, 0.5])
def test_a_loss_that_stays_infinite_is_an_alarm_that_says_what_is_known(kind, scale):
    values, words = INFINITE[kind]
    bad = [skip(30 + i, scale, **values) for i in range(1, 300)]
    (alarm,) = alarms(healthy(1, 30, scale, loss=1.0) + bad)
    assert ("nan", 33, 29) == (alarm.kind, alarm.step, alarm.last_good_step)
    assert f"The loss was {words} for 3 steps in a row, while" in alarm.message
    assert "no lower scale can help" in alarm.message
    assert [] == alarms(healthy(1, 30, scale, loss=1.0) + bad[:2])


def test_an_infinite_loss_of_applied_steps_is_an_alarm():
    """That its weights are broken is not known: its gradients were finite."""
    (alarm,) = alarms(healthy(1, 30, loss=1.0) + healthy(31, 330, loss=math.inf))
    assert ("nan", 33, 29) == (alarm.kind, alarm.step, alarm.last_good_step)
    assert "The loss was infinite for 3 steps in a row" in alarm.message
    assert "no lower scale can help" in alarm.message
    assert "weights are broken" not in alarm.message


def test_a_loss_and_gradients_that_were_bad_in_turn_are_both_named():
    bad = [skip(31, cause="loss"), skip(32, cause="nan"), skip(33, cause="loss")]
    (alarm,) = alarms(healthy(1, 30) + bad)
    words = "The loss was not finite or the gradients were NaN for 3 steps in a row"
    assert words in alarm.message


def test_a_loss_that_was_not_recorded_is_no_nan():
    assert [] == alarms(healthy(1, 60))


def test_two_back_offs_are_enough_if_the_loss_is_rising():
    records = [
        record._replace(loss=1.0 if record.step < 50 else 2.0)
        for record in backing_off(2, every=25)
    ]
    (alarm,) = alarms(records)
    assert ("back-offs", 77) == (alarm.kind, alarm.step)
    assert "is rising" in alarm.message


def test_back_offs_of_an_infinite_loss_are_not_the_gradients():
    records = [
        record._replace(cause="loss") if record.skipped else record
        for record in backing_off(6)
    ]
    assert [] == alarms(records)


def test_a_run_that_looks_for_its_first_scale_is_healthy():
    records = [skip(i + 1, 2.0 ** (24 - i)) for i in range(10)]
    assert [] == alarms([*records, *healthy(11, 200, 2.0**14)])


def test_overflows_at_the_floor():
    policy = describe_policy(Dynamic(min_scale=1.0))
    records = [*healthy(1, 20, 2.0), *(skip(20 + i, 1.0) for i in range(1, 4))]
    (alarm,) = alarms(records, policy)
    assert ("floor", 23, 20) == (alarm.kind, alarm.step, alarm.last_good_step)
    assert [] == alarms(records[:-1], policy)


def test_a_fixed_scale_has_its_floor_where_it_is():
    policy = describe_policy(Fixed(64.0))
    records = [*healthy(1, 20, 64.0), *(skip(20 + i, 64.0) for i in range(1, 4))]
    (alarm,) = alarms(records, policy)
    assert "which is fixed" in alarm.message


def test_nan_without_an_infinity():
    nan = (("b", "nan"),)
    records = [
        *healthy(1, 20),
        *(skip(20 + i, 1024.0 / 2**i, "nan", nonfinite=nan) for i in range(1, 4)),
    ]
    alarm = alarms(records)[0]
    assert ("nan", 23, ("b",)) == (alarm.kind, alarm.step, alarm.names)
    # Step 20 may be what broke the weights.
    assert 19 == alarm.last_good_step
    assert "no lower scale can help" in alarm.message


def test_nan_next_to_an_infinity_is_an_overflow():
    both = (("a", "inf"), ("b", "nan"))
    records = healthy(1, 20)
    records += [skip(20 + i, 1024.0, "nan", nonfinite=both) for i in range(1, 4)]
    assert "nan" not in {alarm.kind for alarm in alarms(records)}


def growing(name, last=256, *, start=64, rate=1.1, loss=None):
    """Return a run whose norm or largest magnitude grows from a step on."""
    return [
        step(i, loss=loss(i) if loss else 2.0, **{name: rate ** max(0, i - start)})
        for i in range(1, last + 1)
    ]


def test_a_norm_that_keeps_growing():
    alarm = alarms(growing("norm"))[0]
    # It grows from step 64 on, and every quarter of 64 steps must show it.
    assert ("norm", 128, 80) == (alarm.kind, alarm.step, alarm.last_good_step)
    assert "the loss is not falling" in alarm.message


def test_a_norm_that_grows_while_the_loss_falls_is_healthy():
    assert [] == alarms(growing("norm", loss=lambda i: 3.0 - i / 200))


def test_a_norm_with_a_spike_is_healthy():
    records = [step(i, norm=100.0 if 60 <= i < 64 else 1.0) for i in range(1, 300)]
    assert [] == alarms(records)


def test_a_largest_gradient_that_reaches_the_end_of_the_range():
    found = alarms(growing("amax", rate=1.05))
    assert {"headroom"} == {alarm.kind for alarm in found}
    assert "overflows at every scale in about" in found[0].message
    slowly = alarms(growing("amax", rate=1.001))
    assert [] == slowly


def test_an_alarm_is_raised_once_while_what_it_saw_goes_on():
    policy = describe_policy(Dynamic(min_scale=1.0, growth_interval=100))
    stuck = [skip(20 + i, 1.0) for i in range(1, 300)]
    assert 1 == len(alarms([*healthy(1, 20, 1.0), *stuck], policy))
    over = healthy(320, 600, 1.0)
    again = [skip(600 + i, 1.0) for i in range(1, 10)]
    assert 2 == len(alarms([*healthy(1, 20, 1.0), *stuck, *over, *again], policy))


def halve(first, count, scale=65536.0):
    """Return skipped steps, each with half the scale of the one before."""
    return [skip(first + i, scale / 2**i) for i in range(count)]


def test_steps_that_are_taken_again_are_judged_without_those_that_they_replace():
    """Three back-offs of each branch are no six of one run."""
    first = [*healthy(1, 300, 65536.0), *halve(301, 3)]
    again = [*healthy(250, 253, 65536.0), *halve(254, 3), *healthy(257, 300, 8192.0)]
    assert [] == alarms([*first, *again])
    more = [*halve(301, 1, 8192.0), *healthy(302, 320, 4096.0)]
    (alarm,) = alarms([*first, *again, *more])
    assert "The scale was lowered 4 times within 49 steps" in alarm.message


def test_an_alarm_of_steps_that_are_taken_again_is_raised_again():
    """Even if they raise it a few steps later."""
    bad = [*healthy(1, 300, 65536.0), *halve(301, 5)]
    again = [*healthy(200, 302, 65536.0), *halve(303, 5)]
    found = alarms([*bad, *again])
    assert [305, 307] == [alarm.step for alarm in found]
    # What goes on since before the step is not new.
    stuck = [skip(20 + i, 1.0) for i in range(1, 100)]
    assert 1 == len(alarms([*healthy(1, 20, 1.0), *stuck, *stuck[50:]]))


def test_a_run_that_starts_again_looks_for_its_first_scale_again():
    search = [*halve(1, 12, 2.0**24), *healthy(13, 50, 2.0**12)]
    assert [] == alarms([*search, *search])


@pytest.mark.parametrize("seed", range(20))
def test_after_steps_are_taken_again_alarms_are_those_of_the_steps_that_are_kept(seed):
    """The recount: a scan over the steps that are left, each of them once."""
    back = random.Random(seed).randrange(1, 399)
    known, other = random_run(seed), random_run(100 + seed)
    branch = other[back - 1 :]
    policy = describe_policy(Dynamic(growth_interval=500))  # the monitor has every step
    monitor = AlarmMonitor(policy=policy)
    before = [alarm for record in known for alarm in monitor.update(record)]
    after = [alarm for record in branch for alarm in monitor.update(record)]
    live = [alarm for alarm in before if alarm.step < back] + after
    assert alarms([*known[: back - 1], *branch], policy) == live


def random_run(seed):
    """Return a run that goes wrong in some way."""
    rng = random.Random(seed)
    scale, records = 1024.0, []
    for number in range(1, 400):
        bad = rng.random() < (0.02 if number < 200 else 0.3)
        values = {"norm": 1.03**number, "loss": 2.0 + number / 400, "amax": 1e-3}
        names = (("a", "inf"),) if bad else ()
        made = skip if bad else step
        records.append(made(number, scale, **values, nonfinite=names))
        scale = max(0.5, scale / 2) if bad else scale * 2 if number % 50 == 0 else scale
    return records


@pytest.mark.parametrize("seed", range(5))
def test_a_live_run_and_its_file_raise_the_same_alarms(tmp_path, seed):
    path, live = tmp_path / "run.jsonl", []
    policy = Dynamic(growth_interval=100)
    with Recorder(path, policy=policy, on_alarm=live.append, writers=()) as recorder:
        for record in random_run(seed):
            fields = {name: getattr(record, name) for name in ("norm", "loss", "amax")}
            recorder.record(
                step=record.step,
                scale=record.scale,
                applied=record.applied,
                nonfinite=record.nonfinite,
                **fields,
            )
    assert live
    run = read_run(path)
    assert [alarm.step for alarm in live] == [a["step"] for a in run.events_of("alarm")]
    policy = run.header["policy"]
    read = list(scan(run.records(), policy=policy))
    assert [(a.kind, a.step) for a in live] == [(a.kind, a.step) for a in read]
    assert {alarm.kind for alarm in live} <= set(KINDS)


def test_alarms_are_written_before_the_step_returns(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, policy=Fixed(8.0), flush_seconds=0, writers=())
    for _ in range(4):
        recorder.record(scale=8.0, applied=False)
    assert '"alarm"' in path.read_text(encoding="utf-8")
    recorder.close()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"backoffs": 0}, SettingError),
        ({"backoffs_while_rising": 0}, SettingError),
        ({"window": -1}, SettingError),
        ({"trend_window": 3}, SettingError),
        ({"trend_ratio": 1.0}, SettingError),
        ({"nan_steps": "3"}, SettingTypeError),
    ],
)
def test_rules_are_checked_when_they_are_made(settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        AlarmRules(**settings)


@pytest.mark.parametrize(
    ("name", "unit"),
    [("backoffs", "back-offs"), ("floor_skips", "overflows"), ("window", "steps")],
)
def test_a_rule_that_is_wrong_says_what_it_counts(name, unit):
    with pytest.raises(SettingError, match=f"{name} must be a whole number of {unit},"):
        AlarmRules(**{name: 0})
