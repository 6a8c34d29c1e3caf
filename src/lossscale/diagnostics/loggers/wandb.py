# SPDX-License-Identifier: Apache-2.0
"""Steps and alarms for Weights & Biases, online or offline."""

from typing import Any

from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.loggers.base import WindowWriter
from lossscale.diagnostics.loggers.packages import import_package
from lossscale.errors import ContextError


class WandbWriter(WindowWriter):
    """Writes to a run of wandb.

    The curves have an axis of their own, `lossscale/step`: wandb's own step may be
    another, and must never go back.
    """

    def __init__(
        self, run: Any = None, *, every: int = 50, dtype: str = "float16"
    ) -> None:
        """Choose the run.

        Args:
            run: What `wandb.init` returned; by default the run that is active.
            every: How many steps are summed up.
            dtype: The format that gradients are stored in, for the headroom.

        Raises:
            MissingPackageError: If wandb is not installed.
            ContextError: If no run is active.
        """
        super().__init__(every=every, dtype=dtype)
        self._wandb = import_package("wandb", "WandbWriter")
        self._run = self._wandb.run if run is None else run
        if self._run is None:
            message = "WandbWriter needs a run: call wandb.init() before it is made."
            raise ContextError(message)
        self._run.define_metric("lossscale/step")
        self._run.define_metric("lossscale/*", step_metric="lossscale/step")

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a window."""
        self._run.log(metrics | {"lossscale/step": step})

    def write_alarm(self, alarm: Alarm) -> None:
        """Send an alert, and write the running total of alarms."""
        super().write_alarm(alarm)
        totals = {"lossscale/alarms_total": self.alarms, "lossscale/step": alarm.step}
        self._run.log(totals)
        level = self._wandb.AlertLevel.WARN
        self._run.alert(
            title=f"loss scale: {alarm.kind}", text=alarm.message, level=level
        )
