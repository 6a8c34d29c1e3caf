# SPDX-License-Identifier: Apache-2.0
"""Steps and alarms for Python's `logging`."""

import logging

from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.loggers.base import StepWriter
from lossscale.diagnostics.records.steps import StepRecord
from lossscale.diagnostics.report.wording import number


class LoggingWriter(StepWriter):
    """Logs a skipped step at INFO and an alarm at WARNING, with the tensors' names.

    Example:
        >>> import logging
        >>> from lossscale.diagnostics import StepRecord
        >>> from lossscale.diagnostics.loggers import LoggingWriter
        >>> writer = LoggingWriter(logging.getLogger("training"))
        >>> writer.write_step(StepRecord(step=7, scale=8.0, applied=False, cause="inf"))
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        """Choose where to log.

        Args:
            logger: By default that of the name "lossscale".
        """
        self._logger = logging.getLogger("lossscale") if logger is None else logger

    def write_step(self, record: StepRecord) -> None:
        """Log a skipped step."""
        if record.applied or not self._logger.isEnabledFor(logging.INFO):
            return
        names = ", ".join(f"{name} ({cause})" for name, cause in record.nonfinite[:8])
        more = len(record.nonfinite) - 8
        self._logger.info(
            "Step %s was skipped at a scale of %s: %s%s%s",
            f"{record.step:,}",
            number(record.scale),
            record.cause,
            f" in {names}" if names else "",
            f" and {more} more" if more > 0 else "",
        )

    def write_alarm(self, alarm: Alarm) -> None:
        """Log an alarm."""
        last = alarm.last_good_step
        good = "unknown" if last is None else f"{last:,}"
        self._logger.warning(
            "Step %s: alarm %s: %s Last step with good weights: %s.",
            f"{alarm.step:,}",
            alarm.kind,
            alarm.message,
            good,
        )
