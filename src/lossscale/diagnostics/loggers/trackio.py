# SPDX-License-Identifier: Apache-2.0
"""Steps and alarms for trackio."""

from typing import Any

from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.loggers.base import WindowWriter
from lossscale.diagnostics.loggers.packages import import_package


class TrackioWriter(WindowWriter):
    """Writes to a run of trackio."""

    def __init__(
        self, run: Any = None, *, every: int = 50, dtype: str = "float16"
    ) -> None:
        """Choose the run.

        Args:
            run: What `trackio.init` returned; by default the run that is active.
            every: How many steps are summed up.
            dtype: The format that gradients are stored in, for the headroom.

        Raises:
            MissingPackageError: If trackio is not installed.
        """
        super().__init__(every=every, dtype=dtype)
        self._trackio = import_package("trackio", "TrackioWriter")
        # Both have `log` and `alert`; the module's are those of the active run.
        self._run = self._trackio if run is None else run

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a window."""
        self._run.log(metrics, step=step)

    def write_alarm(self, alarm: Alarm) -> None:
        """Send an alert, and write the running total of alarms."""
        super().write_alarm(alarm)
        self._run.log({"lossscale/alarms_total": self.alarms}, step=alarm.step)
        self._run.alert(title=f"loss scale: {alarm.kind}", text=alarm.message)
