# SPDX-License-Identifier: Apache-2.0
"""Steps and alarms for MLflow."""

import time

from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.loggers.base import WindowWriter
from lossscale.diagnostics.loggers.packages import import_package
from lossscale.errors import ContextError


class MlflowWriter(WindowWriter):
    """Writes the metrics of a window in one call to a run of MLflow."""

    def __init__(
        self, run_id: str | None = None, *, every: int = 50, dtype: str = "float16"
    ) -> None:
        """Choose the run.

        Args:
            run_id: By default that of the run that is active.
            every: How many steps are summed up.
            dtype: The format that gradients are stored in, for the headroom.

        Raises:
            MissingPackageError: If mlflow is not installed.
            ContextError: If no run is active.
        """
        super().__init__(every=every, dtype=dtype)
        mlflow = import_package("mlflow", "MlflowWriter")
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                message = (
                    "MlflowWriter needs a run: call mlflow.start_run() before it is "
                    "made, or pass run_id."
                )
                raise ContextError(message)
            run_id = str(active.info.run_id)
        self._run_id = run_id
        self._client = mlflow.MlflowClient()
        self._metric = mlflow.entities.Metric

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a window."""
        now = int(time.time() * 1000)
        entries = [
            self._metric(name, value, now, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=entries)

    def write_alarm(self, alarm: Alarm) -> None:
        """Write the running total of alarms, and the latest of each kind as a tag."""
        super().write_alarm(alarm)
        self.write_metrics(alarm.step, {"lossscale/alarms_total": float(self.alarms)})
        tag = f"lossscale.alarm.{alarm.kind}"
        text = f"step {alarm.step}: {alarm.message}"
        self._client.set_tag(self._run_id, tag, text[:_LONGEST_TAG])


_LONGEST_TAG = 5_000
