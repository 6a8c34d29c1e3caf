# SPDX-License-Identifier: Apache-2.0
"""Steps and alarms for the trackers of Accelerate, whichever they are."""

from typing import Any

from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.loggers.base import WindowWriter


class AccelerateWriter(WindowWriter):
    """Writes by `accelerator.log`, to every tracker of `init_trackers`."""

    def __init__(
        self, accelerator: Any, *, every: int = 50, dtype: str = "float16"
    ) -> None:
        """Choose the accelerator.

        Args:
            accelerator: An `accelerate.Accelerator`.
            every: How many steps are summed up.
            dtype: The format that gradients are stored in, for the headroom.
        """
        super().__init__(every=every, dtype=dtype)
        self._accelerator = accelerator

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a window."""
        self._accelerator.log(metrics, step=step)

    def write_alarm(self, alarm: Alarm) -> None:
        """Write the running total of alarms."""
        super().write_alarm(alarm)
        totals = {"lossscale/alarms_total": float(self.alarms)}
        self._accelerator.log(totals, step=alarm.step)
