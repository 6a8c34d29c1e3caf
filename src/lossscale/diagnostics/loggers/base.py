# SPDX-License-Identifier: Apache-2.0
"""What a writer is: something that is handed every step and every alarm of a run.

A writer can be given to a `Recorder`, or used by itself as a scaler's `on_step`. Those
that write to an experiment tracker get windows of steps instead: trackers keep a sample
of the points that they are given, so that a skipped step reported by itself would be
lost, while a running total and a window's extremes are not.
"""

import math
from typing import Any

from lossscale.core import validation
from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.records.blocks import Block, summarize
from lossscale.diagnostics.records.steps import CAUSES, StepRecord, read_report


class StepWriter:
    """Takes every step and every alarm of a run.

    Example:
        >>> from lossscale.diagnostics import StepRecord
        >>> from lossscale.diagnostics.loggers import StepWriter
        >>> class PrintSkips(StepWriter):
        ...     def write_step(self, record):
        ...         if record.skipped:
        ...             print(f"step {record.step} was skipped: {record.cause}")
        >>> PrintSkips().write_step(StepRecord(7, applied=False, cause="inf"))
        step 7 was skipped: inf
    """

    def __call__(self, report: Any) -> None:
        """Take a step report, as `on_step` is given them."""
        self.write_step(read_report(report))

    def write_step(self, record: StepRecord) -> None:
        """Take a step."""

    def write_alarm(self, alarm: Alarm) -> None:
        """Take an alarm."""

    def flush(self) -> None:
        """Write what was held back."""

    def close(self) -> None:
        """Write what was held back, and end."""
        self.flush()


class WindowWriter(StepWriter):
    """Sums up every so many steps, and writes one set of numbers for them.

    Example:
        >>> from lossscale.diagnostics import StepRecord
        >>> from lossscale.diagnostics.loggers import WindowWriter
        >>> class PrintSkips(WindowWriter):
        ...     def write_metrics(self, step, metrics):
        ...         print(step, metrics["lossscale/skipped_total"])
        >>> writer = PrintSkips(every=2)
        >>> writer.write_step(StepRecord(1))
        >>> writer.write_step(StepRecord(2, applied=False, cause="inf"))
        2 1.0
    """

    def __init__(self, *, every: int = 50, dtype: str = "float16") -> None:
        """Set how many steps make a window.

        Args:
            every: How many steps are summed up.
            dtype: The format that gradients are stored in, for the headroom.
        """
        self._every = validation.check_count("every", every)
        self._dtype = dtype
        self._records: list[StepRecord] = []
        self._last_scale: float | None = None
        self._totals = dict.fromkeys(("skipped", *CAUSES), 0)
        self.alarms = 0
        """How many alarms there were."""

    def write_step(self, record: StepRecord) -> None:
        """Take a step; write the window if it is full."""
        self._records.append(record)
        if len(self._records) >= self._every:
            self.flush()

    def write_alarm(self, alarm: Alarm) -> None:
        """Count an alarm; the window before it is written first."""
        del alarm
        self.flush()
        self.alarms += 1

    def flush(self) -> None:
        """Write the window as it is."""
        if not self._records:
            return
        block = summarize(
            self._records,
            offset=0,
            size=0,
            dtype=self._dtype,
            last_scale=self._last_scale,
        )
        self._records = []
        self._last_scale = block.last_scale
        self._totals["skipped"] += block.skipped
        for cause, count in block.causes.items():
            self._totals[cause] += count
        self.write_metrics(block.last, self._metrics(block))

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a window that ends with a step."""
        raise NotImplementedError

    def _metrics(self, block: Block) -> dict[str, float]:
        """Return a window's numbers, by the names under which trackers show them."""
        metrics = {"lossscale/scale": block.last_scale}
        for name, series in block.series.items():
            if series.finite:
                metrics[f"lossscale/{name}_min"] = series.low
                metrics[f"lossscale/{name}_max"] = series.high
                if name != "scale":
                    metrics[f"lossscale/{name}_mean"] = series.mean
        for cause, total in self._totals.items():
            if total or cause == "skipped":
                key = cause.replace(" ", "_")
                suffix = "" if cause == "skipped" else "skipped_"
                metrics[f"lossscale/{suffix}{key}_total"] = float(total)
        metrics["lossscale/skipped_in_window"] = float(block.skipped)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}
