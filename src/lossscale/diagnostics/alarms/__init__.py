# SPDX-License-Identifier: Apache-2.0
"""Alarms: what recent steps say about the steps to come.

Each `find_...` function takes the recent steps of a run, the newest last, and returns
what it sees in them, or `None`. They are pure. `AlarmMonitor` calls them for every step
of a live run, and `scan` for a recorded one, so both raise the same alarms.

    back-offs   the scale was lowered several times within a few steps, although the
                loss was finite: the gradients are growing faster than it can follow;
                fewer times are enough if the loss is rising as well
    floor       steps overflow at the lowest scale that can help
    nan         gradients are NaN without an infinity, or the loss is not finite: no
                lower scale can help
    headroom    the largest gradient is growing towards the end of its format's range
    norm        the norm has grown several times over, and the loss is not falling

An alarm names the last step whose weights are known to be good: the checkpoint to go
back to. Imports the standard library only.
"""

from lossscale.diagnostics.alarms.monitor import AlarmMonitor, scan
from lossscale.diagnostics.alarms.rules import KINDS, Alarm, AlarmRules

__all__ = ["KINDS", "Alarm", "AlarmMonitor", "AlarmRules", "scan"]
