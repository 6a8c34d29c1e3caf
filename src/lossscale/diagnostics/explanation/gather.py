# SPDX-License-Identifier: Apache-2.0
"""`explain_run`: find what a record has about one skipped step."""

import os
from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from lossscale.core.validation import format_value
from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.alarms.detectors import is_beyond_scale
from lossscale.diagnostics.explanation.evidence import (
    Recovery,
    RunExplanation,
    Sample,
    Trend,
)
from lossscale.diagnostics.formats import headroom
from lossscale.diagnostics.records.reader import OnProgress, read_run
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.records.steps import StepRecord
from lossscale.diagnostics.report.summary import find_alarms
from lossscale.errors import SettingError, SettingTypeError

_TREND_STEPS = 64
"""How many applied steps before the skipped one the trend is taken over."""

_LEAST_TREND = 8
"""With fewer, nothing is said of a trend."""


def explain_run(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    on_progress: OnProgress | None = None,
) -> RunExplanation:
    """Return why a step of a recorded run was skipped, as far as the record says.

    Args:
        path: The file that a `Recorder` wrote.
        step: A skipped step. By default the one that led to the first alarm, or else
            the first that was skipped.
        on_progress: Called now and then while a run without a roll-up is read.

    Raises:
        StateError: If it is not a recorded run, or cannot be read.
        SettingError: If there is no such step, or it was not skipped.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale.diagnostics import Recorder, explain_run
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path, names=["a", "b"], writers=()) as recorder:
        ...         bad = {"cause": "inf", "nonfinite": {"a": "inf"}}
        ...         recorder.record(scale=65536.0, applied=False, **bad)
        ...         recorder.record(scale=32768.0, applied=True)
        ...     seen = explain_run(path)
        >>> seen.step, seen.broken_first, seen.nearest_finite, seen.lower_scale_helped
        (1, 'a', 'b', True)
    """
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        message = (
            "step must be the number of a step, got "
            f"{format_value(step)} ({type(step).__name__})."
        )
        raise SettingTypeError(message)
    run = read_run(path, on_progress=on_progress)
    skipped = run.rows - sum(block.applied for block in run.blocks)
    alarms = find_alarms(run)
    first = _find_skipped(run, -1)
    target = _find_step(run, step) if step is not None else _choose(run, alarms, first)
    if target is None:
        return RunExplanation(run.title, None, run.dtype, skipped)
    ahead = _look_ahead(run, target)
    return RunExplanation(
        title=run.title,
        step=target.step,
        dtype=run.dtype,
        skipped=skipped,
        first_skipped=None if first is None else first.step,
        scale=target.scale,
        cause=target.cause,
        loss=target.loss,
        nonfinite=target.nonfinite,
        nearest_finite=target.nearest_finite,
        at_the_end=_is_at_the_end(run, target),
        alarm=alarms[0].kind if alarms else None,
        alarm_step=alarms[0].step if alarms else None,
        **_look_back(run, target),
        **ahead,
        last_good_step=_find_good(
            run, target, alarms, recovered=bool(ahead["recovery"])
        ),
    )


def _find_skipped(run: RunFile, first: int) -> StepRecord | None:
    """Return the first skipped step from a step on; blocks without one are not read."""
    for block in run.blocks:
        if block.last >= first and block.applied < block.rows:
            for record in run.records(max(first, block.first), block.last):
                if record.skipped:
                    return record
    return None


def _find_step(run: RunFile, step: int) -> StepRecord:
    """Return a step that was asked for, or raise."""
    record = next(run.records(step, step), None)
    if record is None:
        first = run.blocks[0].first if run.blocks else None
        has = f"has steps {first} to {run.last_step}" if run.blocks else "has no step"
        message = f"There is no step {step} in {run.path}; it {has}."
        raise SettingError(message)
    if record.applied:
        after = _find_skipped(run, step)
        nearest = _find_skipped(run, -1) if after is None else after
        hint = (
            "No step was skipped."
            if nearest is None
            else f"A step that was skipped is {nearest.step}: --step {nearest.step}"
        )
        message = f"Step {step} was applied, so there is nothing to explain. {hint}"
        raise SettingError(message)
    return record


def _choose(
    run: RunFile, alarms: tuple[Alarm, ...], first: StepRecord | None
) -> StepRecord | None:
    """Return the skipped step that led to the first alarm, or else the first one.

    That is the first skip of the streak that ends at the alarm. An alarm of lowered
    scales may be raised by the step after it.
    """
    if not alarms:
        return first
    alarm = alarms[0]
    target = None
    for record in _read_back(run, alarm.step):
        if record.applied:
            if target is not None or record.step < alarm.step:
                break
        elif alarm.kind == "nan" and target is not None and not is_beyond_scale(record):
            break
        else:
            target = record
    if target is None and alarm.last_good_step is not None:
        later = _find_skipped(run, alarm.last_good_step)
        target = later if later is not None and later.step <= alarm.step else None
    return first if target is None else target


def _read_back(run: RunFile, last: int) -> Iterator[StepRecord]:
    """Yield the steps up to one, the last of them first."""
    for block in reversed(run.blocks):
        if block.first <= last:
            records = list(run.records(block.first, min(block.last, last)))
            yield from reversed(records)


def _is_at_the_end(run: RunFile, target: StepRecord) -> bool:
    """Whether the tensor that broke first is the last of those the run was given."""
    names = run.header["names"]
    return bool(names and target.nonfinite) and target.nonfinite[-1][0] == names[-1]


def _find_good(
    run: RunFile, target: StepRecord, alarms: tuple[Alarm, ...], *, recovered: bool
) -> int | None:
    """Return the last step before it whose weights are known to be good.

    Weights are known to be good when a step with them was finite: if no later step was,
    those of the last applied step may be the cause.
    """
    good_steps = [alarm.last_good_step for alarm in alarms if alarm.step >= target.step]
    if good_steps and good_steps[0] is not None and good_steps[0] < target.step:
        return good_steps[0]
    records = run.records(target.step - 4 * _TREND_STEPS, target.step - 1)
    applied = [record.step for record in records if record.applied]
    if not recovered:
        applied = applied[:-1]
    return applied[-1] if applied else None


def _look_back(run: RunFile, target: StepRecord) -> dict[str, Any]:
    """Return what the steps before say."""
    recent: deque[tuple[int, float]] = deque(maxlen=_TREND_STEPS)
    trend = None
    for record in run.records(target.step - 4 * _TREND_STEPS, target.step - 1):
        if not record.applied:
            continue
        amax = record.amax
        bits_left = None if amax is None else headroom(amax, record.scale, run.dtype)
        if bits_left is not None:
            recent.append((record.step, bits_left))
    if len(recent) >= _LEAST_TREND:
        bits = [bits for _, bits in recent]
        quarter = max(1, len(bits) // 4)
        first, last = fmean(bits[:quarter]), fmean(bits[-quarter:])
        trend = Trend(recent[0][0], first, recent[-1][0], last, min(bits))
    return {"trend": trend, "sample": _sample(run, target)}


def _sample(run: RunFile, target: StepRecord) -> Sample | None:
    """Return the last statistics of the tensor that broke first."""
    if not target.nonfinite:
        return None
    name = target.nonfinite[-1][0]
    before = [block for block in run.blocks if block.first < target.step]
    for block in reversed(before[-_SAMPLED_BLOCKS:]):
        samples = list(run.statistics(block.offset, block.size))
        for statistics in reversed(samples):
            if statistics.step >= target.step:
                continue
            for tensor, _, amax, *_ in statistics.tensors:
                # The statistics are of the gradients as stored: scaled.
                bits = None if amax is None else headroom(amax, 1.0, run.dtype)
                if tensor == name and bits is not None:
                    return Sample(statistics.step, bits)
    return None


_SAMPLED_BLOCKS = 2
"""How many blocks of steps are searched for the last statistics."""


def _look_ahead(run: RunFile, target: StepRecord) -> dict[str, Any]:
    """Return what the steps after say."""
    skips, recovery, again = 0, None, None
    for record in run.records(target.step):
        if recovery is None and record.skipped:
            skips += 1
        elif recovery is None:
            recovery = Recovery(record.step, record.scale)
        if record.applied and record.scale >= target.scale:
            again = record.step
            break
    return {
        "skips_in_a_row": skips,
        "recovery": recovery,
        "same_scale_again": again,
    }
