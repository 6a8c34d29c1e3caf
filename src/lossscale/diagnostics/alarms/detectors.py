# SPDX-License-Identifier: Apache-2.0
"""What recent steps say about the steps to come.

Each `find_...` function takes the recent steps of a run, the newest last, and returns
what it finds in them, or `None`. They are pure.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, takewhile
from statistics import median
from typing import NamedTuple

from lossscale.diagnostics.alarms.rules import LEAST_TREND, Alarm, AlarmRules, Limits
from lossscale.diagnostics.records.steps import StepRecord


def find_backoffs(
    recent: Sequence[StepRecord], rules: AlarmRules, limits: Limits
) -> Alarm | None:
    """Look for several back-offs while the loss was finite."""
    window = recent[-limits.window - 1 :]
    lowered = [
        (before, after)
        for before, after in pairwise(window)
        if after.scale < before.scale and loss_was_finite(before)
    ]
    # A back-off after a growth is how a dynamic scale finds its limit: with a short
    # growth interval there are many of them in every healthy run.
    growths = sum(after.scale > before.scale for before, after in pairwise(window))
    rising = _loss_is_rising(window)
    needed = min(rules.backoffs, rules.backoffs_while_rising) if rising else 0
    if len(lowered) - growths < (needed or rules.backoffs):
        return None
    first, now = lowered[0][0], window[-1]
    names = _names(before for before, _ in lowered)
    raised = sum(
        after.scale > before.scale
        for before, after in pairwise(window)
        if before.step >= first.step
    )
    loss = "finite and is rising" if rising else "finite"
    moves = f"from {first.scale:,.10g} to {now.scale:,.10g}"
    if raised:
        times = "once" if raised == 1 else f"{raised} times"
        moves = f"and raised {times} in between, {moves}"
    message = (
        f"The scale was lowered {len(lowered)} times within "
        f"{now.step - first.step + 1:,} steps, {moves}, and the loss was {loss}: "
        "the gradients are growing faster than the scale can follow"
        f"{_join_names(names)}."
    )
    return Alarm(
        "back-offs", now.step, _find_last_applied(recent, first.step), message, names
    )


def find_floor(
    recent: Sequence[StepRecord], rules: AlarmRules, limits: Limits
) -> Alarm | None:
    """Look for steps that overflow at the lowest scale."""
    window = recent[-rules.floor_window :]
    stuck = [
        record
        for record in window
        if not record.applied
        and record.scale <= limits.floor
        and record.cause in ("inf", "nan")
        and loss_was_finite(record)
    ]
    if len(stuck) < rules.floor_skips:
        return None
    now, names = window[-1], _names(stuck)
    scale = "which is fixed" if limits.fixed else "where a lower one cannot help"
    message = (
        f"{len(stuck)} of the last {len(window)} steps overflowed at a scale of "
        f"{now.scale:,.10g}, {scale}: the gradients are too large for their "
        f"format{_join_names(names)}."
    )
    first = stuck[0].step
    return Alarm("floor", now.step, _find_last_applied(recent, first), message, names)


def find_nan(
    recent: Sequence[StepRecord], rules: AlarmRules, _limits: Limits
) -> Alarm | None:
    """Look for skipped steps that no lower scale can help."""
    streak = _find_streak(recent, rules, is_beyond_scale)
    if not streak:
        return None
    now, names = streak[-1], _names(streak)
    if any(map(loss_was_finite, streak)):
        what = "gradients were NaN"
        if not all(map(loss_was_finite, streak)):
            what = "loss was not finite or the gradients were NaN"
        without, where = " without an infinity", _join_names(names)
    else:  # the gradients follow from it: where they broke says nothing
        what, without, where = f"loss was {_describe_losses(streak)}", "", ""
    message = (
        f"The {what} for {len(streak)} steps in a row{without}, while the scale went "
        f"from {streak[0].scale:,.10g} to {now.scale:,.10g}: no lower scale can "
        f"help{where}."
    )
    good = _find_good_before(recent, streak[0].step)
    return Alarm("nan", now.step, good, message, names)


def find_bad_loss(
    recent: Sequence[StepRecord], rules: AlarmRules, _limits: Limits
) -> Alarm | None:
    """Look for steps that were applied although their loss was not finite."""
    streak = _find_streak(recent, rules, lambda record: not loss_was_finite(record))
    if not streak:
        return None
    what = _describe_losses(streak)
    broken = "the weights are broken, and " if what == "NaN" else ""
    message = (
        f"The loss was {what} for {len(streak)} steps in a row, and the last of them "
        f"was applied: {broken}no lower scale can help."
    )
    good = _find_good_before(recent, streak[0].step)
    return Alarm("nan", streak[-1].step, good, message, _names(streak))


def _find_streak(
    recent: Sequence[StepRecord],
    rules: AlarmRules,
    is_bad: Callable[[StepRecord], bool],
) -> list[StepRecord]:
    """Return the last steps that are all bad, or none if they are too few."""
    streak = list(takewhile(is_bad, reversed(recent)))[::-1]
    return streak if len(streak) >= rules.nan_steps else []


def _describe_losses(streak: Sequence[StepRecord]) -> str:
    """Say what losses were that were not finite, as far as the record has them."""
    losses = [record.loss for record in streak]
    if all(loss is not None and math.isnan(loss) for loss in losses):
        return "NaN"
    if all(loss is not None and math.isinf(loss) for loss in losses):
        return "infinite"
    return "not finite"


def find_headroom_trend(
    recent: Sequence[StepRecord], rules: AlarmRules, limits: Limits
) -> Alarm | None:
    """Look for a largest gradient that grows towards the end of its format's range."""
    window = _list_applied(recent, rules.trend_window)
    trend = _find_rise([record.amax for record in window])
    if trend is None or _loss_is_falling(window):
        return None
    headroom = math.log2(limits.largest / limits.floor) - trend.level
    steps = headroom / trend.slope
    if not steps < rules.horizon:
        return None
    now = window[-1]
    message = (
        f"The largest gradient has grown {2.0**trend.rise:.3g}-fold within "
        f"{len(window)} steps, and the loss is not falling: at this rate it overflows "
        f"at every scale in about {max(0, round(steps)):,} steps."
    )
    return Alarm("headroom", now.step, _before_rise(window), message)


def find_norm_trend(
    recent: Sequence[StepRecord], rules: AlarmRules, _limits: Limits
) -> Alarm | None:
    """Look for a norm that keeps growing while the loss does not fall."""
    window = _list_applied(recent, rules.trend_window)
    trend = _find_rise([record.norm for record in window])
    if trend is None or _loss_is_falling(window):
        return None
    if trend.rise < math.log2(rules.trend_ratio):
        return None
    now = window[-1]
    message = (
        f"The norm of the gradients has grown {2.0**trend.rise:.3g}-fold within "
        f"{len(window)} steps, and the loss is not falling."
    )
    return Alarm("norm", now.step, _before_rise(window), message)


class _Rise(NamedTuple):
    """A steady rise of the medians of four quarters, in doublings."""

    level: float
    rise: float
    slope: float
    """Doublings per step."""


def _find_rise(values: Sequence[float | None]) -> _Rise | None:
    """Return the rise of a series of values, if every quarter is above the one before.

    Medians, so that a spike of a few steps is not a trend.
    """
    logs = [
        math.log2(value)
        for value in values
        if value is not None and 0.0 < value < math.inf
    ]
    quarter = len(logs) // 4
    if quarter < LEAST_TREND // 4:
        return None
    levels = [median(logs[i * quarter : (i + 1) * quarter]) for i in range(4)]
    if not levels[0] < levels[1] < levels[2] < levels[3]:
        return None
    rise = levels[3] - levels[0]
    return _Rise(levels[3], rise, rise / (3 * quarter))


def _list_applied(recent: Sequence[StepRecord], count: int) -> list[StepRecord]:
    return [record for record in recent[-count:] if record.applied]


def _loss_is_falling(window: Sequence[StepRecord]) -> bool:
    """Whether the second half's loss is below the first's; False if it is not known."""
    halves = _loss_of_halves(window)
    return halves is not None and halves[1] < halves[0]


def _loss_is_rising(window: Sequence[StepRecord]) -> bool:
    """Whether the second half's loss is half as high again as the first's."""
    halves = _loss_of_halves(window)
    return halves is not None and halves[1] > _RISE * halves[0] > 0.0


def _loss_of_halves(window: Sequence[StepRecord]) -> tuple[float, float] | None:
    """Return the median loss of either half; `None` if it is not known."""
    losses = [
        record.loss
        for record in window
        if record.loss is not None and math.isfinite(record.loss)
    ]
    half = len(losses) // 2
    return (median(losses[:half]), median(losses[half:])) if half else None


_RISE = 1.5


def _before_rise(window: Sequence[StepRecord]) -> int:
    """Return the last step of the first quarter: the rise came after it."""
    return window[max(0, len(window) // 4 - 1)].step


def loss_was_finite(record: StepRecord) -> bool:
    """Whether a step's loss was finite, or is not known to have been anything else."""
    return record.cause != "loss" and (
        record.loss is None or math.isfinite(record.loss)
    )


def is_beyond_scale(record: StepRecord) -> bool:
    """Whether a step was skipped for what no lower scale can help.

    That is a loss that was not finite, or NaN where no tensor was infinite.
    """
    if record.applied:
        return False
    return not loss_was_finite(record) or (
        record.cause == "nan" and all(c != "inf" for _, c in record.nonfinite)
    )


def _find_good_before(recent: Sequence[StepRecord], first: int) -> int | None:
    """Return the last step with good weights before those that are broken from one on.

    The step before is what may have broken the weights, so those before it are the last
    that are known to be good.
    """
    broke = _find_last_applied(recent, first)
    return None if broke is None else _find_last_applied(recent, broke)


def _find_last_applied(recent: Sequence[StepRecord], before: int) -> int | None:
    """Return the last step that was applied before another one."""
    steps = [
        record.step for record in recent if record.applied and record.step < before
    ]
    return steps[-1] if steps else None


def _names(records: Iterable[StepRecord]) -> tuple[str, ...]:
    """Return the tensors of some steps, each once."""
    return tuple(dict.fromkeys(name for r in records for name, _ in r.nonfinite))


def _join_names(names: Sequence[str]) -> str:
    """Return the tensors nearest to the loss: the first of the backward pass."""
    if not names:
        return ""
    some = ", ".join(names[: -_MOST_NAMED - 1 : -1])
    more = len(names) - _MOST_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f" (first in the backward pass: {some}{rest})"


_MOST_NAMED = 3
