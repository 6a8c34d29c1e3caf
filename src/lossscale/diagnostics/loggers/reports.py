# SPDX-License-Identifier: Apache-2.0
"""Follow the step reports of a scaler from a training loop's callbacks, without a wait.

A report is read when its numbers have arrived from the device: usually a step later.
"""

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias


class HostNumber:
    """A number that is on its way to the host."""

    def __init__(self, value: Any) -> None:
        """Start the copy; a number that the host has already is taken as it is.

        Args:
            value: A number, a tensor of one number, or `None`.
        """
        self._arrived: Any = None
        self._value = value.detach() if hasattr(value, "detach") else value
        if getattr(value, "is_cuda", False):
            torch = sys.modules["torch"]
            # Into pinned memory: torch takes it for a copy that nothing waits for.
            self._value = self._value.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(value.device))

    def is_ready(self) -> bool:
        """Whether reading it would not wait for the device."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> float | None:
        """Return the number."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return None if self._value is None else float(self._value)


class _Waiting(NamedTuple):
    report: Any
    loss: HostNumber
    lr: HostNumber

    def is_ready(self) -> bool:
        return self.report.is_ready() and self.loss.is_ready() and self.lr.is_ready()


Deliver: TypeAlias = Callable[[Any, float | None, float | None], object]
"""Called with a report, its loss and its learning rate."""


class ReportFollower:
    """Hands on the reports of a scaler that some other code made."""

    def __init__(self, scaler: Any, deliver: Deliver) -> None:
        """Start after the steps that the scaler has taken.

        Args:
            scaler: Has `last_step`, a report with an `index`, or `None` at first.
            deliver: Called with every report, in order.
        """
        self._scaler = scaler
        self._deliver = deliver
        self._waiting: deque[_Waiting] = deque()
        last = scaler.last_step
        self._seen = 0 if last is None else int(last.index)

    def poll(self, loss: Any = None, lr: Any = None) -> int | None:
        """Take the newest report, and hand on what has arrived.

        Args:
            loss: The loss of the step, if it is known; on any device.
            lr: Its learning rate.

        Returns:
            The index of the report, if it is a new one.
        """
        last = self._scaler.last_step
        index = None if last is None else int(last.index)
        is_new = index is not None and index != self._seen
        if is_new and index is not None:
            self._seen = index
            self._waiting.append(_Waiting(last, HostNumber(loss), HostNumber(lr)))
        while self._waiting and self._waiting[0].is_ready():
            self._hand_on()
        return index if is_new else None

    def finish(self) -> None:
        """Hand on what is left; waits for the device."""
        while self._waiting:
            self._hand_on()

    def _hand_on(self) -> None:
        report, loss, lr = self._waiting.popleft()
        self._deliver(report, loss.read(), lr.read())
