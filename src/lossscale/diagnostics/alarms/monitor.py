# SPDX-License-Identifier: Apache-2.0
"""Call the detectors for every step of a live run, or of a recorded one."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from lossscale.diagnostics.alarms.detectors import (
    find_backoffs,
    find_bad_loss,
    find_floor,
    find_headroom_trend,
    find_nan,
    find_norm_trend,
    loss_was_finite,
)
from lossscale.diagnostics.alarms.rules import (
    Alarm,
    AlarmRules,
    Limits,
)
from lossscale.diagnostics.records.steps import StepRecord

_TREND_INTERVAL = 32
"""Trends are looked for once in so many steps: they do not change faster."""

_SEARCH_ENDS_AFTER = 8
"""A run has found its first scale after so many applied steps in a row."""


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
        self._dtype = dtype
        self._recent: deque[StepRecord] = deque()
        self.use_policy(policy)
        self._raised: dict[str, _Raised] = {}
        self._applied_in_a_row = 0
        self._search_ended: int | None = None

    def use_policy(self, policy: Mapping[str, Any] | None) -> None:
        """Set the policy, which may be known later than the first step."""
        self.knows_policy = policy is not None
        """Whether the policy is known."""
        self._limits = Limits.read(self._rules, policy, self._dtype)
        longest = max(
            self._limits.window, self._rules.trend_window, self._rules.floor_window
        )
        # Two steps more: the scale before the window, and the weights before that.
        self._recent = deque(self._recent, maxlen=longest + 2)

    def update(self, record: StepRecord) -> list[Alarm]:
        """Take a step, and return the alarms that it raises.

        A step that is not after the last one replaces those from there on.
        """
        if self._recent and record.step <= self._recent[-1].step:
            self._go_back(record.step)
        lowered = bool(self._recent) and record.scale < self._recent[-1].scale
        self._recent.append(record)
        if not record.applied:
            self._applied_in_a_row = 0
        elif self._search_ended is None:
            self._applied_in_a_row += 1
            self._end_search()
        due = record.step % _TREND_INTERVAL == 0
        has_bad_loss = record.applied and not loss_was_finite(record)
        if record.applied and not due and not lowered and not has_bad_loss:
            return []
        recent = list(self._recent)
        # Where it is silent, only that it goes on has to be seen, in every step.
        is_silent = self._is_silent("nan", record.step)
        streak = recent[-self._rules.nan_steps :] if is_silent else recent
        candidates = []
        if lowered and self._search_ended is not None:
            candidates.append(find_backoffs(recent, self._rules, self._limits))
        if not record.applied:
            candidates.append(find_floor(recent, self._rules, self._limits))
            candidates.append(find_nan(streak, self._rules, self._limits))
        if has_bad_loss:
            candidates.append(find_bad_loss(streak, self._rules, self._limits))
        if due:
            candidates.append(find_headroom_trend(recent, self._rules, self._limits))
            candidates.append(find_norm_trend(recent, self._rules, self._limits))
        return [
            alarm for alarm in candidates if alarm is not None and self._is_new(alarm)
        ]

    def _end_search(self) -> None:
        """Forget the back-offs by which the run found its first scale."""
        if self._applied_in_a_row == _SEARCH_ENDS_AFTER:
            self._search_ended = self._recent[-1].step
            while len(self._recent) > _SEARCH_ENDS_AFTER:
                self._recent.popleft()

    def _go_back(self, step: int) -> None:
        """Forget the steps from one on, and the alarms that they raised."""
        while self._recent and self._recent[-1].step >= step:
            self._recent.pop()
        self._raised = {
            kind: _Raised(raised.step, min(raised.last_seen, step - 1))
            for kind, raised in self._raised.items()
            if raised.step < step
        }
        if self._search_ended is not None and self._search_ended >= step:
            self._search_ended = None
            applied = takewhile(lambda record: record.applied, reversed(self._recent))
            self._applied_in_a_row = len(list(applied))

    def _is_new(self, alarm: Alarm) -> bool:
        known = self._raised.get(alarm.kind)
        is_silent = self._is_silent(alarm.kind, alarm.step)
        start = known.step if known is not None and is_silent else alarm.step
        self._raised[alarm.kind] = _Raised(start, alarm.step)
        return not is_silent

    def _is_silent(self, kind: str, step: int) -> bool:
        """Whether an alarm was raised, and what it saw has not been over for long."""
        known = self._raised.get(kind)
        return known is not None and step - known.last_seen <= self._limits.window


class _Raised(NamedTuple):
    """When an alarm of some kind was raised last."""

    step: int
    last_seen: int
    """The last step that would have raised it as well."""


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
