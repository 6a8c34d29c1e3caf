# SPDX-License-Identifier: Apache-2.0
"""What one policy would have done in a recorded run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lossscale.core.policies import Policy
from lossscale.diagnostics.backtests.limits import StepLimits, find_step_limits
from lossscale.diagnostics.backtests.steps import RecordedSteps
from lossscale.diagnostics.backtests.underflow import LostFraction, Sample
from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.sequences import Scales, StepSequence
from lossscale.diagnostics.simulation import Simulation, run_policy


class Estimate(NamedTuple):
    """A number that a record bounds.

    Example:
        >>> from lossscale.diagnostics import Estimate
        >>> Estimate(9, 7, 12).likely
        9
    """

    likely: float
    """What the record makes likely."""
    low: float
    """The lowest of the three assumptions about what the record does not say."""
    high: float
    """The highest of them."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one policy would have done, as far as the record shows it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale import Fixed
        >>> from lossscale.diagnostics import Recorder, backtest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path) as recorder:
        ...         for _ in range(100):
        ...             recorder.record(scale=1024.0, applied=True, amax=0.25)
        ...     result = backtest(path, {"high": Fixed(2.0**20)})
        >>> outcome = result.outcomes["high"]
        >>> outcome.growths, outcome.final_scale.likely
        (0, 1048576.0)
    """

    policy: Policy | None
    """The policy; `None` for what the run itself did."""
    skipped: Estimate
    """How many steps would have been skipped, whatever the reason."""
    growths: int
    """How often the scale would probably have gone up."""
    backoffs: int
    """How often it would probably have gone down."""
    final_scale: Estimate
    """The scale after the last step; of the run itself, that of the last step."""
    median_scale: Estimate
    """The median of the scales of the steps."""
    headroom: float | None
    """The median of how many bits the largest gradient of a step was below the format's
    maximum; `None` without magnitudes."""
    lost: LostFraction | None
    """The fraction of gradient values that became zero, the mean of the sampled steps;
    `None` without statistics."""
    scales: Scales
    """The probable scale of each step of the record."""


class Material(NamedTuple):
    """What is known of a run: everything that outcomes are made from."""

    steps: RecordedSteps
    limits: StepLimits
    samples: Sequence[Sample]
    dtype: str


def prepare(steps: RecordedSteps, samples: Sequence[Sample], dtype: str) -> Material:
    """Return what is known of a run from what was read of it."""
    return Material(steps, find_step_limits(steps, dtype), samples, dtype)


def run_one(policy: Policy, material: Material, *, compiled: bool) -> Outcome:
    """Return what a policy would have done."""
    steps, limits = material.steps, material.limits
    # A held step leaves the state as it is: it is left out, and put back afterwards.
    held = steps.held
    if getattr(policy, "hold_on_nonfinite_loss", False):
        held = held | steps.skipped_by("loss")
    moving = np.flatnonzero(~held)
    magnitudes = limits.magnitudes[moving]
    known_magnitudes = None if np.isnan(magnitudes).all() else magnitudes
    sequences = [
        StepSequence(limit_scales[moving], known_magnitudes)
        for limit_scales in limits.all
    ]
    results = run_policy(policy, sequences, compiled=compiled)
    likely = results[0]
    scales = _spread(likely, moving, steps.size)
    skipped = [result.skipped + int(held.sum()) for result in results]
    return Outcome(
        policy=policy,
        skipped=_estimate(skipped),
        growths=likely.growths,
        backoffs=likely.backoffs,
        final_scale=_estimate([float(result.final.scale) for result in results]),
        median_scale=_estimate([_median_scale(result) for result in results]),
        headroom=_median_headroom(material, scales, scales <= limits.likely),
        lost=_mean_lost(material, scales),
        scales=scales,
    )


def describe_recorded(material: Material) -> Outcome:
    """Return what the run itself did, in the same terms."""
    steps = material.steps
    scales = steps.scales
    moves = np.sign(np.diff(scales))
    last = float(scales[-1])
    median = float(np.quantile(scales, 0.5, method="lower"))
    skipped = int((steps.overflows | steps.held).sum())
    return Outcome(
        policy=None,
        skipped=Estimate(skipped, skipped, skipped),
        growths=int((moves > 0).sum()),
        backoffs=int((moves < 0).sum()),
        final_scale=Estimate(last, last, last),
        median_scale=Estimate(median, median, median),
        headroom=_median_headroom(material, scales, steps.finite),
        lost=_mean_lost(material, scales),
        scales=scales,
    )


def _estimate(values: Sequence[float]) -> Estimate:
    """Return an estimate from its likely value, first, and the others."""
    return Estimate(values[0], min(values), max(values))


def _spread(result: Simulation, moving: npt.NDArray[np.intp], size: int) -> Scales:
    """Return the scale of every step, those that were left out included."""
    counts = np.searchsorted(moving, np.arange(size))
    return result.scale_after(counts)


def _median_scale(result: Simulation) -> float:
    """Return the median of the scales of steps: one of them."""
    if not result.length:
        return float(result.scales[0])
    # Each scale lasts until the next change; the one after the last step was not used.
    lasted = np.diff(np.append(result.steps, result.length))
    order = np.argsort(result.scales)
    reached = np.cumsum(lasted[order])
    index = np.searchsorted(reached, (result.length + 1) // 2)
    return float(result.scales[order][index])


def _median_headroom(
    material: Material, scales: Scales, finite: npt.NDArray[np.bool_]
) -> float | None:
    magnitudes = material.limits.magnitudes
    has_magnitude = finite & (magnitudes > 0.0)
    if not has_magnitude.any():
        return None
    stored = np.log2(magnitudes[has_magnitude]) + np.log2(
        scales[has_magnitude].astype(np.float64)
    )
    return float(np.log2(FORMATS[material.dtype].largest) - np.median(stored))


def _mean_lost(material: Material, scales: Scales) -> LostFraction | None:
    numbers = material.steps.numbers
    fractions = []
    for sample in material.samples:
        index = int(np.searchsorted(numbers, sample.step))
        if index < numbers.size and numbers[index] == sample.step:
            fractions.append(sample.lost_at(float(scales[index])))
    if not fractions:
        return None
    return LostFraction(*np.mean(fractions, axis=0).tolist())
