# SPDX-License-Identifier: Apache-2.0
"""Alarms: what recent steps say about the steps to come.

Each `find_...` function takes the recent steps of a run, the newest last, and returns
what it sees in them, or `None`. They are pure. `AlarmMonitor` calls them for every step
of a live run, and `scan` for a recorded one, so both raise the same alarms.

    back-offs   the scale was lowered several times within a few steps, although the
                loss was finite: the gradients are growing faster than it can follow;
                fewer times are enough if the loss is rising as well
    floor       steps overflow at the lowest scale that can help
    nan         gradients are NaN without an infinity: no lower scale can help
    headroom    the largest gradient is growing towards the end of its format's range
    norm        the norm has grown several times over, and the loss is not falling

An alarm names the last step whose weights are known to be good: the checkpoint to go
back to. Imports the standard library only.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from lossscale.core import validation
from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.records.steps import StepRecord
from lossscale.errors import SettingError

KINDS = ("back-offs", "floor", "nan", "headroom", "norm")
"""Every kind of alarm."""


class Alarm(NamedTuple):
    """One alarm."""

    kind: str
    """One of `KINDS`."""
    step: int
    """The step that raised it."""
    last_good_step: int | None
    """The last step whose weights are known to be good; `None` if there is none."""
    message: str
    """What was seen, and what follows from it."""
    names: tuple[str, ...] = ()
    """The tensors that were not finite, if there are any."""


@dataclass(frozen=True, kw_only=True)
class AlarmRules:
    """When alarms are raised.

    Example:
        >>> from lossscale.diagnostics import AlarmRules
        >>> AlarmRules(backoffs=3, window=500).floor_skips
        3
    """

    backoffs: int = 4
    """How many back-offs within `window` raise an alarm."""
    backoffs_while_rising: int = 2
    """How many raise one if the loss has risen by half within `window` as well."""
    window: int | None = None
    """Within how many steps; by default the policy's growth interval, and at most 500:
    a healthy scale backs off about once in that time."""
    floor_skips: int = 3
    """How many overflows within `floor_window`, at the lowest scale, raise an alarm."""
    floor_window: int = 10
    """Within how many steps."""
    nan_steps: int = 3
    """How many steps in a row with NaN, and without an infinity, raise an alarm."""
    trend_window: int = 64
    """How many steps the trends of norm and headroom are looked for in."""
    trend_ratio: float = 8.0
    """How many times over the norm must have grown within that."""
    horizon: int = 256
    """How many steps before it would overflow at every scale a growing gradient raises
    an alarm."""

    def __post_init__(self) -> None:
        """Check every setting."""
        for name in (
            *(
                "backoffs",
                "backoffs_while_rising",
                "floor_skips",
                "floor_window",
                "nan_steps",
                "trend_window",
            ),
            "horizon",
        ):
            validation.check_count(name, getattr(self, name))
        if self.window is not None:
            validation.check_count("window", self.window)
        validation.check_above_one("trend_ratio", self.trend_ratio)
        if self.trend_window < _LEAST_TREND:
            message = (
                f"trend_window must be {_LEAST_TREND} or more, got {self.trend_window}."
            )
            raise SettingError(message)


_LEAST_TREND = 16
_LONGEST_WINDOW = 500
_TREND_INTERVAL = 32
"""Trends are looked for once in so many steps: they do not change faster."""
_SETTLED = 8
"""A run has found its first scale after so many applied steps in a row."""


class Limits(NamedTuple):
    """What the policy of a run means for its alarms."""

    window: int
    """How many steps back-offs are counted over."""
    floor: float
    """The lowest scale that can help: the policy's floor, and not below 1."""
    largest: float
    """The largest number of the format that gradients are stored in."""
    fixed: bool = False
    """Whether the scale never moves."""

    @classmethod
    def read(
        cls, rules: AlarmRules, policy: Mapping[str, Any] | None, dtype: str
    ) -> "Limits":
        """Return the limits that a run's header leads to."""
        settings = policy or {}
        interval = _number(settings, "growth_interval", 2000.0)
        window = rules.window or max(1, min(int(interval), _LONGEST_WINDOW))
        fixed = settings.get("kind") == "fixed"
        floor = _number(settings, "scale" if fixed else "min_scale", 1.0)
        # Below 1 a scale no longer protects anything: gradients that overflow there are
        # too large for the format themselves.
        return cls(window, max(1.0, floor), FORMATS[dtype].largest, fixed)


def _number(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name)
    usable = isinstance(value, (int, float)) and 0 < value < math.inf
    return float(value) if usable and value is not None else default


def find_backoffs(
    recent: Sequence[StepRecord], rules: AlarmRules, limits: Limits
) -> Alarm | None:
    """Look for several back-offs while the loss was finite."""
    window = recent[-limits.window - 1 :]
    lowered = [
        (before, after)
        for before, after in pairwise(window)
        if after.scale < before.scale and _loss_was_finite(before)
    ]
    rising = _loss_is_rising(window)
    needed = min(rules.backoffs, rules.backoffs_while_rising) if rising else 0
    if len(lowered) < (needed or rules.backoffs):
        return None
    first, now = lowered[0][0], window[-1]
    names = _names(before for before, _ in lowered)
    loss = "finite and is rising" if rising else "finite"
    message = (
        f"The scale was lowered {len(lowered)} times within "
        f"{now.step - first.step + 1:,} steps, from {first.scale:,.10g} to "
        f"{now.scale:,.10g}, and the loss was {loss}: the gradients are growing faster "
        f"than the scale can follow{_listed(names)}."
    )
    return Alarm(
        "back-offs", now.step, _last_applied(recent, first.step), message, names
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
    ]
    if len(stuck) < rules.floor_skips:
        return None
    now, names = window[-1], _names(stuck)
    scale = "which is fixed" if limits.fixed else "where a lower one cannot help"
    message = (
        f"{len(stuck)} of the last {len(window)} steps overflowed at a scale of "
        f"{now.scale:,.10g}, {scale}: the gradients are too large for their "
        f"format{_listed(names)}."
    )
    first = stuck[0].step
    return Alarm("floor", now.step, _last_applied(recent, first), message, names)


def find_nan(
    recent: Sequence[StepRecord], rules: AlarmRules, _limits: Limits
) -> Alarm | None:
    """Look for NaN that no infinity came with."""
    streak = recent[-rules.nan_steps :]
    if len(streak) < rules.nan_steps or not all(map(_is_nan_alone, streak)):
        return None
    # The streak may be longer: its first step is the evidence.
    start = len(recent) - 1
    while start > 0 and _is_nan_alone(recent[start - 1]):
        start -= 1
    now, names = recent[-1], _names(recent[start:])
    what = "loss was" if now.cause == "loss" else "gradients were"
    message = (
        f"The {what} NaN for {len(recent) - start} steps in a row without an "
        "infinity, while the scale went from "
        f"{recent[start].scale:,.10g} to {now.scale:,.10g}: no lower scale can "
        f"help{_listed(names)}."
    )
    # The step before is what may have broken the weights, so those before it are the
    # last that are known to be good.
    broke = _last_applied(recent, recent[start].step)
    good = None if broke is None else _last_applied(recent, broke)
    return Alarm("nan", now.step, good, message, names)


def find_headroom_trend(
    recent: Sequence[StepRecord], rules: AlarmRules, limits: Limits
) -> Alarm | None:
    """Look for a largest gradient that grows towards the end of its format's range."""
    window = _applied(recent, rules.trend_window)
    trend = _find_rise([record.amax for record in window])
    if trend is None or _loss_is_falling(window):
        return None
    left = math.log2(limits.largest / limits.floor) - trend.level
    steps = left / trend.slope
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
    window = _applied(recent, rules.trend_window)
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
    if quarter < _LEAST_TREND // 4:
        return None
    levels = [median(logs[i * quarter : (i + 1) * quarter]) for i in range(4)]
    if not levels[0] < levels[1] < levels[2] < levels[3]:
        return None
    rise = levels[3] - levels[0]
    return _Rise(levels[3], rise, rise / (3 * quarter))


def _applied(recent: Sequence[StepRecord], count: int) -> list[StepRecord]:
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


def _loss_was_finite(record: StepRecord) -> bool:
    return record.cause != "loss" and (
        record.loss is None or math.isfinite(record.loss)
    )


def _is_nan_alone(record: StepRecord) -> bool:
    """Whether a step was skipped for NaN, and no tensor was infinite."""
    if record.applied:
        return False
    if record.cause == "loss":
        return record.loss is None or math.isnan(record.loss)
    return record.cause == "nan" and all(c != "inf" for _, c in record.nonfinite)


def _last_applied(recent: Sequence[StepRecord], before: int) -> int | None:
    """Return the last step that was applied before another one."""
    steps = [
        record.step for record in recent if record.applied and record.step < before
    ]
    return steps[-1] if steps else None


def _names(records: Iterable[StepRecord]) -> tuple[str, ...]:
    """Return the tensors of some steps, each once."""
    return tuple(dict.fromkeys(name for r in records for name, _ in r.nonfinite))


def _listed(names: Sequence[str]) -> str:
    """Return the tensors nearest to the loss: the first of the backward pass."""
    if not names:
        return ""
    some = ", ".join(names[: -_MOST_NAMED - 1 : -1])
    more = len(names) - _MOST_NAMED
    return f" (first in {some}{f' and {more} more' if more > 0 else ''})"


_MOST_NAMED = 3


class AlarmMonitor:
    """Raises the alarms of a run, step by step.

    An alarm that was raised is silent until what it saw has been over for as long as
    its window.

    Example:
        >>> from lossscale.diagnostics import StepRecord
        >>> from lossscale.diagnostics.alarms import AlarmMonitor
        >>> monitor = AlarmMonitor(policy={"min_scale": 1.0})
        >>> for step in range(1, 4):
        ...     stuck = StepRecord(step, scale=1.0, applied=False, cause="inf")
        ...     found = monitor.update(stuck)
        >>> [alarm.kind for alarm in found]
        ['floor']
    """

    def __init__(
        self,
        rules: AlarmRules | None = None,
        *,
        policy: Mapping[str, Any] | None = None,
        dtype: str = "float16",
    ) -> None:
        """Start with no step.

        Args:
            rules: When alarms are raised.
            policy: The settings of the run's policy, as its header has them.
            dtype: The format that its gradients are stored in.
        """
        self._rules = AlarmRules() if rules is None else rules
        self._limits = Limits.read(self._rules, policy, dtype)
        longest = max(
            self._limits.window, self._rules.trend_window, self._rules.floor_window
        )
        # Two steps more: the scale before the window, and the weights before that.
        self._recent: deque[StepRecord] = deque(maxlen=longest + 2)
        self._last_seen: dict[str, int] = {}
        self._applied_in_a_row = 0
        self._settled = False

    def update(self, record: StepRecord) -> list[Alarm]:
        """Take a step, and return the alarms that it raises."""
        lowered = bool(self._recent) and record.scale < self._recent[-1].scale
        self._recent.append(record)
        if not record.applied:
            self._applied_in_a_row = 0
        elif not self._settled:
            self._applied_in_a_row += 1
            self._settle()
        due = record.step % _TREND_INTERVAL == 0
        if record.applied and not due and not lowered:
            return []
        recent = list(self._recent)
        found = []
        if lowered and self._settled:
            found.append(find_backoffs(recent, self._rules, self._limits))
        if not record.applied:
            found.append(find_floor(recent, self._rules, self._limits))
            found.append(find_nan(recent, self._rules, self._limits))
        if due:
            found.append(find_headroom_trend(recent, self._rules, self._limits))
            found.append(find_norm_trend(recent, self._rules, self._limits))
        return [alarm for alarm in found if alarm is not None and self._is_new(alarm)]

    def _settle(self) -> None:
        """Forget the back-offs by which the run found its first scale."""
        if self._applied_in_a_row == _SETTLED:
            self._settled = True
            while len(self._recent) > _SETTLED:
                self._recent.popleft()

    def _is_new(self, alarm: Alarm) -> bool:
        last = self._last_seen.get(alarm.kind)
        self._last_seen[alarm.kind] = alarm.step
        return last is None or not 0 <= alarm.step - last <= self._limits.window


def scan(
    records: Iterable[StepRecord],
    rules: AlarmRules | None = None,
    *,
    policy: Mapping[str, Any] | None = None,
    dtype: str = "float16",
) -> Iterator[Alarm]:
    """Yield the alarms of a recorded run.

    Args:
        records: Its steps, in order.
        rules: When alarms are raised.
        policy: The settings of its policy, as its header has them.
        dtype: The format that its gradients are stored in.
    """
    monitor = AlarmMonitor(rules, policy=policy, dtype=dtype)
    for record in records:
        yield from monitor.update(record)
