# SPDX-License-Identifier: Apache-2.0
"""Up to which scale each step of a record is finite: at most, probably, at least.

Of every step the record has one point: at its own scale it was finite, or
it was not. All three answers agree with that point, so that the recorded policy itself
takes the recorded steps again, whatever is assumed. For other scales:

- A step is finite where its largest gradient, times the scale, stays the gap of
  `gap.py` below the format's maximum: the least gap that the record allows at most, the
  likely one probably, and the largest at least.
- The largest gradient of an overflow is not known, and neither that of a step that was
  not measured. That of the measured steps next to it, two before and two after, is
  taken for it: the mean of their logarithms. An overflow also overflows at every scale
  above the recorded one.
- An overflow at a scale that fits the steps next to it was an unusual batch: probably
  it is finite just below its scale. That is the most there is for every overflow. At
  least it is finite at the scale of the next finite step, if that is lower, and else
  nowhere.
- Where nothing is measured, a finite step is probably finite up to the scale at which
  the nearest overflow occurred, and at least up to its own. An overflow is probably
  finite at the scale of the next finite step.
- No scale helps a step whose loss was not finite, nor one with NaN after which the next
  finite step had no lower scale, or none came. NaN of another kind is an overflow
  (infinities that met) probably, and at least nothing that a scale helps.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lossscale.diagnostics.backtests.gap import Gap, find_gap
from lossscale.diagnostics.backtests.steps import Flags, RecordedSteps
from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.sequences import Floats, Scales, find_limits, next_scale


@dataclass(frozen=True, eq=False)
class StepLimits:
    """The largest scale at which each step is finite, under three assumptions."""

    at_most: Scales
    likely: Scales
    at_least: Scales
    magnitudes: Floats
    """The largest unscaled gradient of each step, measured or filled in; NaN where
    nothing was measured at all."""
    gap: Gap
    hopeless: Flags
    """The steps that no scale helps."""

    @property
    def all(self) -> tuple[Scales, Scales, Scales]:
        """The likely one, then those that bound it."""
        return self.likely, self.at_most, self.at_least


def find_step_limits(steps: RecordedSteps, dtype: str) -> StepLimits:
    """Return up to which scale each step of a record is finite."""
    finite, overflows = steps.finite, steps.overflows
    largest = FORMATS[dtype].largest
    magnitudes = fill_magnitudes(steps)
    below = next_scale(steps.scales, 0)
    after = _scale_after(steps)
    hopeless = overflows & (
        steps.broken_loss
        | steps.skipped_by("loss")
        | (steps.skipped_by("nan") & ~(after < steps.scales))
    )
    headroom = np.log2(largest) - _log2(magnitudes) - _log2(steps.scales)
    finite_known = finite & np.isfinite(headroom) & ~np.isnan(steps.magnitudes)
    overflow_known = overflows & ~hopeless & np.isfinite(headroom)
    gap = find_gap(headroom[finite_known], headroom[overflow_known])

    at_most, likely, at_least = (
        find_limits(magnitudes * 2.0**bits, largest)
        for bits in (gap.least, gap.likely, gap.most)
    )
    lower = after < steps.scales
    nothing = np.float32(0)
    proven = np.where(lower & ~steps.skipped_by("nan"), after, nothing)
    without = np.where(lower, after, below)

    def join(of_finite: Scales, of_overflows: Scales) -> Scales:
        """Return limits that agree with what is recorded of each step."""
        limits = np.where(
            overflows,
            np.minimum(of_overflows, below),
            np.maximum(of_finite, steps.scales),
        )
        return np.where(hopeless, nothing, limits).astype(np.float32)

    return StepLimits(
        at_most=join(_where_known(at_most, np.inf), below),
        likely=join(
            _where_known(likely, _nearest_overflow(steps)),
            _where_known(likely, without),
        ),
        at_least=join(
            _where_known(at_least, steps.scales),
            np.minimum(_where_known(at_least, np.inf), proven),
        ),
        magnitudes=magnitudes,
        gap=gap,
        hopeless=hopeless,
    )


def _where_known(limits: Scales, default: npt.ArrayLike) -> Scales:
    return np.where(np.isnan(limits), default, limits).astype(np.float32)


def fill_magnitudes(steps: RecordedSteps) -> Floats:
    """Return the largest gradient of every step, from its neighbours if unknown."""
    magnitudes: Floats = steps.magnitudes.copy()
    magnitudes[steps.overflows] = np.nan
    measured = np.flatnonzero(magnitudes > 0.0)
    missing = np.flatnonzero(np.isnan(magnitudes))
    if measured.size and missing.size:
        logs = np.log2(magnitudes[measured])
        next_one = np.searchsorted(measured, missing)
        positions = next_one[:, None] + np.arange(-_NEIGHBOURS, _NEIGHBOURS)
        inside = (positions >= 0) & (positions < measured.size)
        neighbours = np.where(
            inside, logs[np.clip(positions, 0, measured.size - 1)], 0.0
        )
        magnitudes[missing] = np.exp2(neighbours.sum(axis=1) / inside.sum(axis=1))
    return magnitudes


_NEIGHBOURS = 2
"""How many measured steps before a step, and after it, tell about it."""


def _scale_after(steps: RecordedSteps) -> Scales:
    """Return the scale of the next finite step; infinite if there is none."""
    finite = np.flatnonzero(steps.finite)
    scales = np.append(steps.scales[finite], np.float32(np.inf))
    return scales[np.searchsorted(finite, np.arange(steps.size), side="right")]


def _nearest_overflow(steps: RecordedSteps) -> Scales:
    """Return just less than the scale of the overflow nearest to each step.

    Without any, the highest scale of the run.
    """
    overflows = np.flatnonzero(steps.overflows)
    if not overflows.size:
        return np.full(steps.size, steps.scales.max(initial=0.0), np.float32)
    below = next_scale(steps.scales[overflows], 0)
    positions = np.arange(steps.size)
    after = np.clip(np.searchsorted(overflows, positions), 0, overflows.size - 1)
    before = np.clip(after - 1, 0, overflows.size - 1)
    nearer = np.abs(overflows[before] - positions) <= np.abs(
        overflows[after] - positions
    )
    return below[np.where(nearer, before, after)]


def _log2(values: npt.NDArray[np.floating]) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log2(values.astype(np.float64)))
