# SPDX-License-Identifier: Apache-2.0
"""What the page holds of a run's statistics: heat maps and exponent histograms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.records.statistics_line import Statistics
from lossscale.diagnostics.report.encoding import encode_arrays

Floats = npt.NDArray[np.float64]

MOST_ROWS = 150
"""How many tensors a heat map has, at most: those nearest to the ends of the range."""

MOST_COLUMNS = 240
"""How many points in time a heat map has, at most."""

_MOST_CELLS = 400_000
"""How many statistics of single tensors are read one by one, at most."""

_SAMPLES = 8
"""How many steps have an exponent histogram in the page."""

_MOST_HISTOGRAMS = 60
"""How many tensors have one of their own; the others count among all tensors."""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """The extremes of every tensor over time."""

    names: list[str]
    """The tensors, in the model's order."""
    first: npt.NDArray[np.int64]
    """The first step of each column."""
    last: npt.NDArray[np.int64]
    """The last step of each column."""
    headroom: Floats
    """How often each tensor could double, at the least; NaN where not measured."""
    lost: Floats
    """The largest share of each that was zero or subnormal."""
    hidden: int = 0
    """How many tensors were left out."""


def make_heat_map(run: RunFile) -> HeatMap | None:
    """Return the heat map of a run, or `None` if it has no statistics."""
    found = _extremes(run)
    if found is None:
        return None
    first, last, amax, lost, broken = found
    starts = np.arange(0, len(first), -(-len(first) // MOST_COLUMNS))
    ends = np.append(starts[1:], len(first)) - 1
    amax = np.fmax.reduceat(amax, starts, axis=0).T
    lost = np.fmax.reduceat(lost, starts, axis=0).T
    broken = np.logical_or.reduceat(broken, starts, axis=0).T
    largest = np.log2([FORMATS[dtype_of(run, i)].largest for i in range(len(amax))])
    with np.errstate(divide="ignore"):
        headroom = largest[:, None] - np.log2(amax)
    # A tensor of zeros alone is as far from an overflow as can be shown; one that has
    # a number that is not finite is beyond the range.
    headroom = np.where(broken, BROKEN, np.minimum(headroom, _FARTHEST))
    lost = np.where(broken & (amax == 0) & (lost == 0), np.nan, lost)
    shown = _most_telling(headroom, lost)
    if not shown:
        return None
    return HeatMap(
        names=[run.names[index] for index in shown],
        first=first[starts],
        last=last[ends],
        headroom=headroom[shown],
        lost=lost[shown],
        hidden=int(np.isfinite(headroom).any(axis=1).sum()) - len(shown),
    )


_FARTHEST = 300.0

BROKEN = -1.0
"""The headroom that represents a tensor with a number that is not finite."""


def dtype_of(run: RunFile, index: int) -> str:
    """Return the format that limits a tensor's gradient."""
    return run.dtypes[index] if index < len(run.dtypes) else run.dtype


def _extremes(run: RunFile) -> tuple[Any, ...] | None:
    """Return what was measured, one row per point in time.

    Steps, largest magnitudes, shares lost, and whether a number was not finite.
    """
    samples = sum(block.samples for block in run.tensor_blocks)
    if not samples:
        return None
    if samples * max(1, len(run.names)) > _MOST_CELLS:
        return _extremes_of_blocks(run)
    positions = {name: index for index, name in enumerate(run.names)}
    found = list(_every_sample(run))
    steps = np.array([sample.step for sample in found])
    amax = np.full((len(found), len(run.names)), np.nan)
    lost = np.full((len(found), len(run.names)), np.nan)
    broken = np.zeros((len(found), len(run.names)), bool)
    for row, sample in enumerate(found):
        for tensor in sample.tensors:
            name, size, largest, zeros, subnormals, *_ = tensor
            if size:
                amax[row, positions[name]] = largest
                lost[row, positions[name]] = zeros + subnormals
                broken[row, positions[name]] = count_nonfinite(tensor) > 0
    return steps, steps, amax, lost, broken


def count_nonfinite(tensor: Sequence[Any]) -> int:
    """Return how many numbers of a tensor are not finite, from its row of statistics.

    They are those that are neither zero nor in the histogram.
    """
    _, size, largest, zeros, _, _, counts = tensor
    if largest and not counts:  # it was recorded without a histogram
        return 0
    left = size - zeros * size - sum(counts)
    return round(left) if left > _ROUNDING * zeros * size + 0.5 else 0


_ROUNDING = 6e-6
"""How exact the share of zeros is: a record has six digits of it."""


def _extremes_of_blocks(run: RunFile) -> tuple[Any, ...]:
    """Return what `_extremes` does from the roll-up.

    It does not count what is not finite in the statistics; the steps between them name
    the tensors that broke.
    """
    blocks, names = run.tensor_blocks, run.names
    amax = _padded([block.amax for block in blocks], len(names))
    lost = _padded([block.lost for block in blocks], len(names))
    broken = np.zeros(amax.shape, bool)
    positions = {name: index for index, name in enumerate(names)}
    lasts = np.array([block.last for block in blocks])
    for steps in run.blocks:
        row = min(int(np.searchsorted(lasts, steps.first)), len(blocks) - 1)
        if steps.skipped and not steps.tensors:  # no names were recorded
            broken[row] |= (amax[row] == 0) & (lost[row] == 0)
        named = [positions[one.name] for one in steps.tensors if one.name in positions]
        broken[row, named] |= ~np.isnan(amax[row, named])
    # Without a number it is empty, and was not measured.
    amax[(amax == 0) & (lost == 0) & ~broken] = np.nan
    return np.array([block.first for block in blocks]), lasts, amax, lost, broken


def _padded(rows: Sequence[Sequence[float | None]], width: int) -> Floats:
    table = np.full((len(rows), width), np.nan)
    for target, row in zip(table, rows, strict=True):
        known = row[:width]
        target[: len(known)] = [np.nan if value is None else value for value in known]
    return table


def _every_sample(run: RunFile) -> list[Statistics]:
    """Return all statistics, each step's once: as they were measured last."""
    if not run.blocks:
        return []
    found = run.statistics(run.start, run.end - run.start)
    by_step = {sample.step: sample for sample in found}
    return [by_step[step] for step in sorted(by_step)]


def _most_telling(headroom: Floats, lost: Floats) -> list[int]:
    """Return the tensors that a heat map shows, in the model's order."""
    measured = np.flatnonzero(np.isfinite(headroom).any(axis=1))
    if measured.size <= MOST_ROWS:
        return [int(index) for index in measured]
    near = np.argsort(np.nanmin(headroom[measured], axis=1))
    far = np.argsort(-np.nanmax(lost[measured], axis=1))
    order = np.column_stack([near, far]).ravel()
    chosen = list(dict.fromkeys(order.tolist()))[:MOST_ROWS]
    return sorted(int(measured[index]) for index in chosen)


def encode_heat_map(heat_map: HeatMap) -> dict[str, Any]:
    """Return a heat map as the page has it: hundredths, as 16-bit integers."""
    return {
        "names": heat_map.names,
        "first": heat_map.first.tolist(),
        "last": heat_map.last.tolist(),
        "hidden": heat_map.hidden,
        "data": encode_arrays(
            [_hundredths(heat_map.headroom), _hundredths(100 * heat_map.lost)]
        ),
    }


_MISSING = -(2**15)


def _hundredths(values: Floats) -> npt.NDArray[np.int16]:
    bounded = np.clip(np.round(100 * values), _MISSING + 1, 2**15 - 1)
    return np.where(np.isfinite(values), bounded, _MISSING).astype(np.int16).ravel()


@dataclass(frozen=True, eq=False)
class Histograms:
    """Exponent histograms of a few steps."""

    steps: list[int]
    scales: list[float]
    names: list[str]
    """The tensors; the first represents all of them together."""
    first_exponent: int
    counts: npt.NDArray[np.float32]
    """By step, tensor and exponent: how many numbers."""
    sizes: npt.NDArray[np.float32]
    """By step and tensor: how many numbers there are."""
    zeros: npt.NDArray[np.float32]
    """By step and tensor: how many of them are zero."""
    nonfinite: npt.NDArray[np.float32]
    """By step and tensor: how many of them are not finite."""


ALL_TENSORS = "all tensors"


def make_histograms(run: RunFile, heat_map: HeatMap | None) -> Histograms | None:
    """Return the histograms of a run, or `None` if it has no statistics."""
    samples = [sample for sample in _choose_samples(run, heat_map) if sample.tensors]
    if not samples:
        return None
    names = _choose_names(samples, heat_map)
    filled = [row for s in samples for row in s.tensors if row[6]]
    first = min((row[5] for row in filled), default=0)
    end = max((row[5] + len(row[6]) for row in filled), default=1)
    positions = {name: index + 1 for index, name in enumerate(names)}
    counts = np.zeros((len(samples), len(names) + 1, end - first))
    sizes = np.zeros((len(samples), len(names) + 1))
    zeros, nonfinite = np.zeros_like(sizes), np.zeros_like(sizes)
    for i, sample in enumerate(samples):
        for tensor in sample.tensors:
            name, size, _, zero_fraction, _, start, bins = tensor
            for j in {0, positions.get(name, 0)}:
                counts[i, j, start - first : start - first + len(bins)] += bins
                sizes[i, j] += size
                zeros[i, j] += round(zero_fraction * size)
                nonfinite[i, j] += count_nonfinite(tensor)
    return Histograms(
        steps=[sample.step for sample in samples],
        scales=[sample.scale for sample in samples],
        names=[ALL_TENSORS, *names],
        first_exponent=first,
        counts=counts.astype(np.float32),
        sizes=sizes.astype(np.float32),
        zeros=zeros.astype(np.float32),
        nonfinite=nonfinite.astype(np.float32),
    )


def _choose_samples(run: RunFile, heat_map: HeatMap | None) -> list[Statistics]:
    """Return the statistics of a few steps: spread over the run, and at its worst."""
    if heat_map is None:
        return []
    columns = np.linspace(0, heat_map.first.size - 1, _SAMPLES - 1).round()
    # A step may have statistics of no tensor at all.
    worst = int(np.nanargmin(np.fmin.reduce(heat_map.headroom, axis=0)))
    wanted = sorted({*columns.astype(int).tolist(), worst})
    found = {}
    for column in wanted:
        for sample in _samples_at(run, int(heat_map.last[column])):
            found[sample.step] = sample
    return [found[step] for step in sorted(found)]


def _samples_at(run: RunFile, step: int) -> list[Statistics]:
    """Return the statistics of a step, wherever in the file they are."""
    for index, block in enumerate(run.blocks):
        if block.first <= step <= block.last:
            # A block's last statistics may follow its last step.
            end = run.blocks[index + 1] if index + 1 < len(run.blocks) else None
            stop = run.end if end is None else end.offset + end.size
            found = run.statistics(block.offset, stop - block.offset)
            return [sample for sample in found if sample.step == step][-1:]
    return []


def _choose_names(samples: Sequence[Statistics], heat_map: HeatMap | None) -> list[str]:
    """Return the tensors that have histograms of their own, in the model's order."""
    names = list(dict.fromkeys(row[0] for s in samples for row in s.tensors))
    if len(names) <= _MOST_HISTOGRAMS or heat_map is None:
        return names[:_MOST_HISTOGRAMS]
    known = set(names)
    shown = [name for name in heat_map.names if name in known]
    step = -(-len(shown) // _MOST_HISTOGRAMS)
    return shown[::step]


def encode_histograms(histograms: Histograms) -> dict[str, Any]:
    """Return histograms as the page has them."""
    return {
        "steps": histograms.steps,
        "scales": histograms.scales,
        "names": histograms.names,
        "first": histograms.first_exponent,
        "bins": int(histograms.counts.shape[2]),
        # The last step at which there is something to see.
        "chosen": int(np.flatnonzero(histograms.counts.any(axis=(1, 2)))[-1:].sum()),
        "data": encode_arrays(
            [
                histograms.counts.ravel(),
                histograms.sizes.ravel(),
                histograms.zeros.ravel(),
                histograms.nonfinite.ravel(),
            ]
        ),
    }


@dataclass(frozen=True)
class Outcome:
    """What becomes of a tensor's numbers in a format."""

    to_zero: float
    """The share that rounds to zero."""
    subnormal: float
    """The share that is subnormal, and loses precision."""
    overflow: float
    """The share that overflows, at least."""
    overflow_most: float
    """The share that overflows, at most: in the format's last exponent, a histogram
    does not say which numbers are above its largest."""


def outcome(
    counts: npt.ArrayLike,
    first_exponent: int,
    total: float,
    dtype: str,
    shift: int,
    *,
    nonfinite: float = 0.0,
) -> Outcome:
    """Return what becomes of numbers if their scale is multiplied by a power of two.

    The page computes the same; see `outcome` in `assets/page.js`.

    Args:
        counts: How many numbers have which exponent, as stored.
        first_exponent: That of the first count.
        total: How many numbers there are; of those beyond the counts nothing is known.
        dtype: The format that they are stored in.
        shift: The power of two.
        nonfinite: How many numbers were not finite: they stay so at every scale.
    """
    found = np.asarray(counts, np.float64)
    exponents = np.arange(found.size) + first_exponent + shift
    limits = FORMATS[dtype]
    above = nonfinite + float(found[exponents > limits.largest_exponent].sum())
    partly = 0.0
    if limits.largest < 2.0**limits.largest_exponent * _NEARLY_TWO:
        partly = float(found[exponents == limits.largest_exponent].sum())
    # Half the smallest number rounds to zero; anything above that, to the smallest.
    lost = float(found[exponents < limits.smallest - 1].sum())
    small = (exponents >= limits.smallest - 1) & (exponents < limits.smallest_normal)
    share = 1.0 / max(1.0, total)
    return Outcome(
        to_zero=lost * share,
        subnormal=float(found[small].sum()) * share,
        overflow=above * share,
        overflow_most=(above + partly) * share,
    )


_NEARLY_TWO = 1.99
"""Formats whose largest number is above this times a power of two hold all but a sliver
of their last exponent: float16 and wider ones. The float8 formats end at 1.75."""
