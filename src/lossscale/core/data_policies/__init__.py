# SPDX-License-Identifier: Apache-2.0
"""Policies that see more than one flag: magnitudes, rates, schedules.

    auto_start.py            AutoStart           the first scale from the first batch
    headroom.py              Headroom            the largest recent magnitude
    log_max.py               LogMax              mean and spread of log2 magnitudes
    histogram.py             Histogram           values above an edge
    saturation.py            Saturation          values at the format's maximum
    overflow_rate.py         OverflowRate        the fraction of steps that overflowed
    window_follows_scale.py  WindowFollowsScale  an interval that follows the scale
    rising_floor.py          RisingFloor         a floor that rises on a schedule

    rule_based.py            what they share: the rule that they fall back to
    octaves.py               powers of two by comparison and multiplication

Each holds a `Dynamic`, its `rule`, which decides about every overflow and about every
step whose measurements are missing. As in `rule.py` there are operators and `where`
alone, elementwise, in float32; a product that is added to something goes through
`where` first, so that no compiler contracts the two and rounds differently.
"""

from lossscale.core.data_policies.auto_start import AutoStart
from lossscale.core.data_policies.headroom import Headroom
from lossscale.core.data_policies.histogram import Histogram
from lossscale.core.data_policies.log_max import LogMax
from lossscale.core.data_policies.overflow_rate import OverflowRate
from lossscale.core.data_policies.rising_floor import RisingFloor
from lossscale.core.data_policies.rule_based import RuleBased
from lossscale.core.data_policies.saturation import Saturation
from lossscale.core.data_policies.window_follows_scale import WindowFollowsScale

__all__ = [
    "AutoStart",
    "Headroom",
    "Histogram",
    "LogMax",
    "OverflowRate",
    "RisingFloor",
    "RuleBased",
    "Saturation",
    "WindowFollowsScale",
]
