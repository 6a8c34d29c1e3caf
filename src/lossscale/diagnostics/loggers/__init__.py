# SPDX-License-Identifier: Apache-2.0
"""Writers of steps and alarms for the trackers that people use.

Each imports its package when it is made, and says what to install if it is missing.
"""

from lossscale.diagnostics.loggers.base import StepWriter, WindowWriter
from lossscale.diagnostics.loggers.python_logging import LoggingWriter

__all__ = ["LoggingWriter", "StepWriter", "WindowWriter"]
