# SPDX-License-Identifier: Apache-2.0
"""Read a recorded run: one step per line, as JSON.

    true                                                     or false: was it finite?
    {"finite": true}                                         the same
    {"finite": true, "magnitude": 3.1e-05, "scale": 65536}   with what was measured

`magnitude` is the largest magnitude of the step's gradients, unscaled; `scale` is the
scale that the step used. Other keys are not read. From a magnitude follows whether the
step overflows at another scale. Of a step that was not finite no magnitude is known
(what is measured there is the largest *finite* one), but that it overflowed at its
scale: it is taken to overflow there and above, and to be finite below.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lossscale.core.headroom import LARGEST
from lossscale.core.validation import FLOAT32_MAX, format_value
from lossscale.errors import StateError


@dataclass(frozen=True, eq=False)
class Recording:
    """What is known of the steps of a run.

    Example:
        >>> from lossscale.diagnostics import read_recording
        >>> lines = ['{"finite": true, "magnitude": 0.5}', "false"]
        >>> read_recording(lines).measured
        1
    """

    finite: npt.NDArray[np.bool_]
    """Whether each step was finite."""
    measurements: npt.NDArray[np.float64]
    """The largest unscaled magnitude of each finite step; NaN where it is unknown."""
    overflow_scales: npt.NDArray[np.float64]
    """The scale of each step that overflowed; NaN elsewhere and where it is unknown."""

    @property
    def measured(self) -> int:
        """How many steps have a magnitude."""
        return int(np.count_nonzero(~np.isnan(self.measurements)))

    @property
    def bounded(self) -> int:
        """How many steps overflowed at a scale that is known."""
        return int(np.count_nonzero(~np.isnan(self.overflow_scales)))

    @property
    def replayed(self) -> int:
        """How many steps can only be repeated as they were, whatever the scale."""
        return self.finite.size - self.measured - self.bounded

    def magnitudes(self, dtype: str) -> npt.NDArray[np.float64]:
        """Return what `simulate` takes, for gradients of a dtype.

        A step that overflowed at a scale gets a magnitude that just does so there.
        """
        least = LARGEST[dtype] / self.overflow_scales * (1.0 + 2.0**-40)
        return np.where(np.isnan(least), self.measurements, least)


class _Step(NamedTuple):
    finite: bool
    magnitude: float = math.nan
    overflow_scale: float = math.nan


def read_recording(lines: Iterable[str], name: str = "The recording") -> Recording:
    """Read a recorded run, such as an open file.

    Args:
        lines: One step per line; empty lines are left out.
        name: What errors call it.

    Raises:
        StateError: If a line is no step, naming the line, or if there is none.

    Example:
        >>> from lossscale.diagnostics import read_recording
        >>> read_recording(["true", "false"]).finite.tolist()
        [True, False]
    """
    steps = [
        _parse(line.lstrip("\ufeff"), f"{name}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip("\ufeff \t\r\n")
    ]
    if not steps:
        message = f"{name} holds no step."
        raise StateError(message)
    finite, magnitudes, scales = zip(*steps, strict=True)
    return Recording(np.array(finite), np.array(magnitudes), np.array(scales))


def _parse(line: str, where: str) -> _Step:
    """Return the step that a line holds."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    entries = value if isinstance(value, dict) else {"finite": value}
    finite = entries.get("finite")
    if not isinstance(finite, bool):
        message = (
            f'{where}: expected true, false or an object with "finite", got '
            f"{line.strip()[:60]!r}."
        )
        raise StateError(message)
    magnitude = _number(entries, "magnitude", 0.0, "0 or more", where)
    scale = _number(entries, "scale", math.ulp(0.0), "above 0", where)
    if finite:
        return _Step(finite, magnitude=magnitude)
    return _Step(finite, overflow_scale=scale)


def _number(
    entries: dict[str, Any], key: str, lowest: float, expected: str, where: str
) -> float:
    """Return an optional number; NaN if it is not there."""
    value = entries.get(key)
    if value is None:
        return math.nan
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not usable or not lowest <= value <= FLOAT32_MAX:
        message = (
            f"{where}: '{key}' must be a finite float32 number, {expected}, got "
            f"{format_value(value)}."
        )
        raise StateError(message)
    return float(value)
