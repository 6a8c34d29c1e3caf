# SPDX-License-Identifier: Apache-2.0
"""When alarms are raised, and what the policy of a run means for them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lossscale.core import validation
from lossscale.diagnostics.formats import FORMATS
from lossscale.errors import SettingError

KINDS = ("back-offs", "floor", "nan", "headroom", "norm")
"""Every kind of alarm."""


class Alarm(NamedTuple):
    """One alarm.

    Example:
        >>> from lossscale.diagnostics import Alarm
        >>> Alarm("floor", 40, 36, "3 overflows at the lowest scale.").last_good_step
        36
    """

    kind: str
    """One of `KINDS`."""
    step: int
    """The step that raised it."""
    last_good_step: int | None
    """The last step whose weights are known to be good; `None` if there is none."""
    message: str
    """What was seen, and what follows from it."""
    names: tuple[str, ...] = ()
    """The tensors that were not finite, if there are any."""


@dataclass(frozen=True, kw_only=True)
class AlarmRules:
    """When alarms are raised.

    Example:
        >>> from lossscale.diagnostics import AlarmRules
        >>> AlarmRules(backoffs=3, window=500).floor_skips
        3
    """

    backoffs: int = 4
    """How many back-offs within `window`, less its growths, raise an alarm."""
    backoffs_while_rising: int = 2
    """How many raise one if the loss has risen by half within `window` as well."""
    window: int | None = None
    """Within how many steps; by default the policy's growth interval, from 100 to 500:
    a healthy scale backs off about once more than it grows in that time."""
    floor_skips: int = 3
    """How many overflows within `floor_window`, at the lowest scale, raise an alarm."""
    floor_window: int = 10
    """Within how many steps."""
    nan_steps: int = 3
    """How many steps in a row raise one, if their loss was not finite or they had NaN
    without an infinity."""
    trend_window: int = 64
    """How many steps the trends of norm and headroom are looked for in."""
    trend_ratio: float = 8.0
    """How many times over the norm must have grown within that."""
    horizon: int = 256
    """How many steps before it would overflow at every scale a growing gradient raises
    an alarm."""

    def __post_init__(self) -> None:
        """Check every setting."""
        for name in ("floor_window", "nan_steps", "trend_window", "horizon"):
            validation.check_count(name, getattr(self, name))
        for name in ("backoffs", "backoffs_while_rising"):
            validation.check_count(name, getattr(self, name), "back-offs")
        validation.check_count("floor_skips", self.floor_skips, "overflows")
        if self.window is not None:
            validation.check_count("window", self.window)
        validation.check_above_one("trend_ratio", self.trend_ratio)
        if self.trend_window < LEAST_TREND:
            message = (
                f"trend_window must be {LEAST_TREND} or more, got {self.trend_window}."
            )
            raise SettingError(message)


LEAST_TREND = 16

_LONGEST_WINDOW = 500
_SHORTEST_WINDOW = 100
"""The noise of the loss is a rise within fewer steps."""


class Limits(NamedTuple):
    """What the policy of a run means for its alarms."""

    window: int
    """How many steps back-offs are counted over."""
    floor: float
    """The lowest scale that can help: the policy's floor, and not below 1."""
    largest: float
    """The largest number of the format that gradients are stored in."""
    fixed: bool = False
    """Whether the scale never moves."""

    @classmethod
    def read(
        cls, rules: AlarmRules, policy: Mapping[str, Any] | None, dtype: str
    ) -> "Limits":
        """Return the limits that a run's header leads to."""
        settings = policy or {}
        interval = _number(settings, "growth_interval", 2000.0)
        usual = max(_SHORTEST_WINDOW, min(int(interval), _LONGEST_WINDOW))
        window = rules.window or usual
        fixed = settings.get("kind") == "fixed"
        floor = _number(settings, "scale" if fixed else "min_scale", 1.0)
        # Below 1 a scale no longer protects anything: gradients that overflow there are
        # too large for the format themselves.
        return cls(window, max(1.0, floor), FORMATS[dtype].largest, fixed)


def _number(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name)
    usable = isinstance(value, (int, float)) and 0 < value < math.inf
    return float(value) if usable and value is not None else default
