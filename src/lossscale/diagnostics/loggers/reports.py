# SPDX-License-Identifier: Apache-2.0
"""Follow the step reports of a scaler from a training loop's callbacks, without a wait.

A report is read when its numbers have arrived from the device: usually a step later.
"""

from collections import deque
from collections.abc import Callable
from typing import Any


class ReportFollower:
    """Hands on the reports of a scaler that some other code made."""

    def __init__(self, scaler: Any, deliver: Callable[[Any], object]) -> None:
        """Start after the steps that the scaler has taken.

        Args:
            scaler: Has `last_step`, a report with an `index`, or `None` at first.
            deliver: Called with every report, in order.
        """
        self._scaler = scaler
        self._deliver = deliver
        self._waiting: deque[Any] = deque()
        last = scaler.last_step
        self._seen = 0 if last is None else int(last.index)

    def poll(self) -> int | None:
        """Take the newest report, hand on what has arrived; return its index if new."""
        last = self._scaler.last_step
        index = None if last is None else int(last.index)
        is_new = index is not None and index != self._seen
        if is_new and index is not None:
            self._seen = index
            self._waiting.append(last)
        while self._waiting and self._waiting[0].is_ready():
            self._deliver(self._waiting.popleft())
        return index if is_new else None

    def finish(self) -> None:
        """Hand on what is left; waits for the device."""
        while self._waiting:
            self._deliver(self._waiting.popleft())
