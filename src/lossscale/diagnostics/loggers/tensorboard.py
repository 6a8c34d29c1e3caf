# SPDX-License-Identifier: Apache-2.0
"""Steps and alarms for TensorBoard.

TensorBoard keeps a sample of the points of each curve, so that a skipped step logged by
itself is usually not shown. Skips are therefore running totals, and everything else is
the smallest, largest and mean value of a window.
"""

import os
from typing import Any

from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.loggers.base import WindowWriter
from lossscale.diagnostics.loggers.packages import import_package


class TensorBoardWriter(WindowWriter):
    """Writes event files, or to a `SummaryWriter` that exists.

    Example:
        >>> import os, tempfile
        >>> from lossscale.diagnostics import StepRecord
        >>> from lossscale.diagnostics.loggers import TensorBoardWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = TensorBoardWriter(folder)
        ...     writer.write_step(StepRecord(1))
        ...     writer.close()
        ...     len(os.listdir(folder))
        1
    """

    def __init__(self, target: Any, *, every: int = 50, dtype: str = "float16") -> None:
        """Choose where to write.

        Args:
            target: A folder for event files (needs the package tensorboard), or an
                object with `add_scalar(tag, value, step)`, such as the SummaryWriter of
                torch.utils.tensorboard or of tensorboardX.
            every: How many steps are summed up.
            dtype: The format that gradients are stored in, for the headroom.

        Raises:
            MissingPackageError: If tensorboard is needed and not installed.
        """
        super().__init__(every=every, dtype=dtype)
        self._owns = isinstance(target, (str, os.PathLike))
        self._writer = target
        if self._owns:
            summary = import_package("tensorboard.summary", "TensorBoardWriter")
            self._writer = summary.Writer(os.fspath(target))

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a window."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def write_alarm(self, alarm: Alarm) -> None:
        """Write the running total of alarms, and the alarm as text where possible."""
        super().write_alarm(alarm)
        self._writer.add_scalar("lossscale/alarms_total", self.alarms, alarm.step)
        if hasattr(self._writer, "add_text"):
            self._writer.add_text("lossscale/alarm", alarm.message, alarm.step)

    def close(self) -> None:
        """Write what was held back; close the event file if it is this writer's."""
        self.flush()
        if self._owns:
            self._writer.close()
        else:
            self._writer.flush()
