# SPDX-License-Identifier: Apache-2.0
"""`recommend`: policy, start and interval for the next run, and on what they rest.

Every recommendation follows from the record, by these rules:

- The *start* is half of the largest power of two at which the first hundred finite
  steps are probably finite: another run has other batches.
- The *interval* is that of those tried (`INTERVALS`) which would have skipped the
  fewest steps of the record, among those that lose as few values as the best of them:
  within a thousandth of all values if tensors were measured, otherwise with a median
  scale of at least half of the highest.
- `Headroom` is recommended instead of `Dynamic` if every step was measured and if, at
  its worst, it would have skipped fewer steps than that interval probably does, and
  loses as few values. Windows of 500 and of 50 steps are tried.

Without magnitudes the start is the lowest scale of the first hundred finite steps, and
the interval is the recorded one, four times as long if most skips followed a growth.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log2

import numpy as np

from lossscale.core.data_policies import Headroom
from lossscale.core.policies import Dynamic, Fixed, Policy
from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.backtests.backtest import read_material, run_all
from lossscale.diagnostics.backtests.code import (
    find_framework,
    write_code,
)
from lossscale.diagnostics.backtests.evidence import (
    EARLY,
    Evidence,
    collect_evidence,
)
from lossscale.diagnostics.backtests.outcome import (
    Material,
    Outcome,
    describe_recorded,
    prepare,
)
from lossscale.diagnostics.backtests.steps import OnProgress
from lossscale.diagnostics.records.reader import read_run
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.report.summary import find_alarms

INTERVALS = (100, 200, 500, 1000, 2000, 5000)
"""The growth intervals that are tried."""

_WINDOWS = (500, 50)
_MOST_FOR_HEADROOM = 200_000
_LEAST_STEPS = 100
_MOST_HOPELESS = 0.05
_AS_FEW = 1e-3
_HIGHEST_START, _LOWEST_START = 2.0**32, 2.0**-14
_WIDE = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Recommendation:
    """What to use for the next run like a recorded one.

    Example:
        >>> from lossscale import Dynamic
        >>> from lossscale.diagnostics import Recommendation
        >>> found = Recommendation(Dynamic(growth_interval=500), (), (), "torch")
        >>> print(found.code.splitlines()[-2])
        policy = lossscale.Dynamic(init_scale=2.0**16, growth_interval=500)
    """

    policy: Policy | None
    """The policy; `None` if the record does not show which."""
    reasons: tuple[str, ...]
    """What was seen, and what follows from it, in sentences."""
    limits: tuple[str, ...]
    """What the record does not show."""
    framework: str
    """The framework of the recorded run."""
    recorded: Outcome | None = None
    """What the run itself did."""
    outcome: Outcome | None = None
    """What the policy would have done in it."""

    @property
    def code(self) -> str:
        """The policy as code to paste; empty without one."""
        if self.policy is None:
            return ""
        return write_code(self.policy, self.framework)


def recommend(
    run: RunFile | str | os.PathLike[str], *, on_progress: OnProgress | None = None
) -> Recommendation:
    """Recommend policy, start and interval for the next run like a recorded one.

    Args:
        run: A run that a `Recorder` wrote, or its path.
        on_progress: Called now and then, for a progress bar.

    Raises:
        StateError: If the run cannot be read, or holds no step.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale.diagnostics import Recorder, recommend
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path) as recorder:
        ...         for _ in range(200):
        ...             recorder.record(scale=1024.0, applied=True, amax=0.25)
        ...     found = recommend(path)
        >>> found.policy.init().scale
        65536.0
    """
    run = run if isinstance(run, RunFile) else read_run(run)
    framework = find_framework(run.header.get("versions") or {})
    material = read_material(run, on_progress)
    limits = []
    alarm = _find_decisive_alarm(run, material)
    if alarm is not None:
        good = alarm.step if alarm.last_good_step is None else alarm.last_good_step
        limits.append(
            f"Step {alarm.step:,} raised an alarm ({alarm.kind}). Steps from "
            f"{good + 1:,} on are left out: they are of a training that goes wrong."
        )
        steps = material.steps.before(good + 1)
        material = prepare(steps, material.samples, run.dtype)
    refusal = _refuse(material)
    if refusal is not None:
        return Recommendation(None, (refusal,), tuple(limits), framework)
    recorded = describe_recorded(material)
    if run.dtype in _WIDE:
        reason = (
            f"The gradients were stored in {run.dtype}, which has the range of "
            "float32: they need no loss scale."
        )
        return Recommendation(Fixed(1.0), (reason,), tuple(limits), framework, recorded)
    evidence = collect_evidence(material)
    choose = _by_magnitudes if evidence.measured else _without_magnitudes
    policy, outcome, reasons, more = choose(material, evidence, run)
    return Recommendation(
        policy, tuple(reasons), (*limits, *more), framework, recorded, outcome
    )


def _find_decisive_alarm(run: RunFile, material: Material) -> Alarm | None:
    """Return the first alarm of a training that goes wrong; `None` if there is none.

    Back-offs alone may be how a scale finds its limit, and NaN may be infinities that
    met: then a lower scale ended it.
    """
    for alarm in find_alarms(run):
        index = int(np.searchsorted(material.steps.numbers, alarm.step))
        hopeless = bool(material.limits.hopeless[index : index + 1].any())
        if alarm.kind != "back-offs" and (alarm.kind != "nan" or hopeless):
            return alarm
    return None


def _refuse(material: Material) -> str | None:
    """Return why nothing can be recommended; `None` if something can."""
    steps = material.steps
    finite, hopeless = int(steps.finite.sum()), int(material.limits.hopeless.sum())
    if steps.size and hopeless > _MOST_HOPELESS * steps.size:
        return (
            f"{hopeless:,} of {steps.size:,} steps were skipped for what no scale "
            "helps: a loss that was not finite, or NaN that no back-off ended. No "
            "policy mends that; lossscale report shows the tensors."
        )
    if finite < _LEAST_STEPS:
        return (
            f"The record is too short: it has {finite:,} finite steps, and at least "
            f"{_LEAST_STEPS} are needed."
        )
    return None


_Choice = tuple[Policy, Outcome | None, list[str], list[str]]


def _by_magnitudes(material: Material, evidence: Evidence, run: RunFile) -> _Choice:
    """Return a policy from what magnitudes show, the reasons, and the limits."""
    del run
    start = _power_below(evidence.early_limit) / 2
    start = min(max(start, _LOWEST_START), _HIGHEST_START)
    reasons = [_about_start(material, evidence, start)]
    candidates: dict[str, Policy] = {
        f"{interval:,}": Dynamic(init_scale=start, growth_interval=interval)
        for interval in INTERVALS
    }
    outcomes = run_all(candidates, material)
    chosen = _choose_interval(outcomes)
    policy, outcome = candidates[chosen], outcomes[chosen]
    reasons += list(_about_skips(evidence))
    reasons.append(_about_interval(chosen, outcomes, material.steps.size))
    limits = []
    if evidence.measured < evidence.finite:
        limits.append(
            f"{evidence.measured:,} of {evidence.finite:,} finite steps have a largest "
            "magnitude; the others are taken to be like those next to them."
        )
    elif material.steps.size > _MOST_FOR_HEADROOM:
        limits.append(
            f"Headroom was not tried: it is for records of up to "
            f"{_MOST_FOR_HEADROOM:,} steps."
        )
    else:
        better = _try_headroom(start, material, outcome)
        if better is not None:
            policy, outcome, reason = better
            reasons.append(reason)
    if not material.limits.gap.overflows:
        limits.append(
            "No step overflowed, so the record does not show whether gradients inside "
            "the network overflow before those of the weights."
        )
    return policy, outcome, reasons, limits


def _try_headroom(
    start: float, material: Material, ruled: Outcome
) -> tuple[Policy, Outcome, str] | None:
    """Return `Headroom` if it saves skips for certain, and why; else `None`."""
    margin = max(2.0, ceil(material.limits.gap.likely) + 1.0)
    for window in _WINDOWS:
        policy = Headroom(Dynamic(init_scale=start), margin=margin, window=window)
        tried = run_all({"headroom": policy}, material)["headroom"]
        if tried.skipped.high < ruled.skipped.likely and _loses_as_few(tried, ruled):
            reason = (
                f"Headroom with a margin of {margin:g} and a window of {window} would "
                f"have skipped {tried.skipped.high:,} steps at most, fewer than that "
                f"interval, {_why_as_few(tried)}."
            )
            return policy, tried, reason
    return None


def _power_below(limit: float) -> float:
    """Return the largest power of two that is not above a limit."""
    return 2.0 ** floor(log2(min(max(limit, 2.0**-126), 2.0**126)))


def _about_start(material: Material, evidence: Evidence, start: float) -> str:
    gap = material.limits.gap.likely
    inside = (
        f", less {gap:.1f} bits for the gradients inside the network (of "
        f"{material.limits.gap.explained:,} overflows)"
        if gap > 0.0
        else ""
    )
    return (
        f"The largest gradient of the first {min(EARLY, evidence.finite):,} finite "
        f"steps, {_power(evidence.early_magnitude)} unscaled, allows a scale of "
        f"{_power(_power_below(evidence.early_limit))}{inside}. Start at "
        f"{_power(start)}: another run has other batches."
    )


def _about_skips(evidence: Evidence) -> Iterator[str]:
    if evidence.early_skips:
        yield (
            f"{evidence.early_skips:,} steps were skipped before the first finite one, "
            "because the start was too high."
        )
    if evidence.skips > evidence.early_skips:
        yield (
            f"{evidence.after_growth:,} of {evidence.skips - evidence.early_skips:,} "
            "later skips came within 3 steps after a growth."
        )


def _choose_interval(outcomes: dict[str, Outcome]) -> str:
    """Return the interval with the fewest skips of those that lose as few values."""
    best = min(outcomes.values(), key=_loss_of)
    good = [name for name, outcome in outcomes.items() if _loses_as_few(outcome, best)]
    # Of equal ones the usual 2000 or what is nearest below it.
    order = sorted(good, key=lambda name: _distance(int(name.replace(",", ""))))
    return min(order, key=lambda name: outcomes[name].skipped.likely)


def _distance(interval: int) -> tuple[bool, int]:
    usual = Dynamic().growth_interval
    return interval > usual, abs(interval - usual)


def _loss_of(outcome: Outcome) -> float:
    """Return what a policy loses: less is better."""
    if outcome.lost is not None:
        return outcome.lost.known
    return -outcome.median_scale.likely


def _loses_as_few(outcome: Outcome, best: Outcome) -> bool:
    if outcome.lost is not None and best.lost is not None:
        return outcome.lost.known <= best.lost.known + _AS_FEW
    return outcome.median_scale.likely >= best.median_scale.likely / 2


def _why_as_few(outcome: Outcome) -> str:
    if outcome.lost is None:
        return "with a median scale of at least half of that one's"
    return "and would have lost as few values"


def _about_interval(chosen: str, outcomes: dict[str, Outcome], steps: int) -> str:
    outcome = outcomes[chosen]
    text = (
        f"From there an interval of {chosen} would have skipped "
        f"{outcome.skipped.likely:,} of these {steps:,} steps"
    )
    most = max(outcomes, key=lambda name: outcomes[name].skipped.likely)
    if outcomes[most].skipped.likely > outcome.skipped.likely:
        text += f", one of {most} {outcomes[most].skipped.likely:,}"
    fewer = min(outcomes, key=lambda name: outcomes[name].skipped.likely)
    if outcomes[fewer].skipped.likely < outcome.skipped.likely:
        text += (
            f"; one of {fewer} {outcomes[fewer].skipped.likely:,}, but its scale would "
            "have stayed too low"
        )
    return f"{text}."


def _without_magnitudes(
    material: Material, evidence: Evidence, run: RunFile
) -> _Choice:
    """Return a policy from the skips alone."""
    del material
    start = _power_below(evidence.early_scale)
    recorded = (run.header.get("policy") or {}).get("growth_interval")
    interval = recorded if isinstance(recorded, int) and recorded > 0 else 2000
    lowest = _power(evidence.early_scale)
    count = min(EARLY, evidence.finite)
    reasons = [
        f"The first {count:,} finite steps had scales of {lowest} or more: start there."
    ]
    reasons += _about_skips(evidence)
    later = evidence.skips - evidence.early_skips
    if later >= _ENOUGH_SKIPS and evidence.after_growth > later / 2:
        interval *= 4
        reasons.append(
            f"Most growths led to a skip, so an interval of {interval:,} instead of "
            f"{interval // 4:,} saves three of four of them."
        )
    else:
        reasons.append(f"Nothing speaks against an interval of {interval:,}.")
    limit = (
        "No largest magnitude was recorded: whether a higher start would do, and how "
        "another interval would have gone, the record does not show. Record amax."
    )
    policy = Dynamic(init_scale=start, growth_interval=interval)
    return policy, None, reasons, [limit]


_ENOUGH_SKIPS = 3


def _power(value: float) -> str:
    """Return a number as a power of two."""
    if value == 0.0:
        return "0"
    exponent = log2(value)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"2^{exponent:.1f}"
