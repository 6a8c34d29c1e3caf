# SPDX-License-Identifier: Apache-2.0
"""The values that vanish at another scale, from the exponents of sampled steps."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.records.statistics_line import Statistics
from lossscale.diagnostics.report.tensors import dtype_of

MOST_PARTS = 64
"""How many parts of a long run are searched for samples; each is of 4,096 steps."""


class LostFraction(NamedTuple):
    """The fraction of gradient values that became zero.

    Example:
        >>> from lossscale.diagnostics import LostFraction
        >>> LostFraction(known=0.01, most=0.05).most
        0.05
    """

    known: float
    """Those that were stored as another number in the record."""
    most: float
    """With those that the record holds as zeros. How many of these are zero indeed, and
    how many would be another number at a higher scale, it does not say."""


class Sample(NamedTuple):
    """The stored gradients of one step, by their distance to vanishing."""

    step: int
    scale: float
    zeros: float
    """The fraction of values that were stored as zero."""
    distances: npt.NDArray[np.int64]
    """Powers of two by which some values must become smaller to round to zero."""
    fractions: npt.NDArray[np.float64]
    """The fraction of the values for each of them."""

    def lost_at(self, scale: float) -> LostFraction:
        """Return what becomes zero at a scale.

        Between two powers of two it is counted as if the scale were the lower one.
        """
        shift = int(np.floor(np.log2(scale) - np.log2(self.scale)))
        fraction = float(self.fractions[self.distances + shift <= 0].sum())
        return LostFraction(fraction, fraction + self.zeros)


def read_samples(run: RunFile) -> list[Sample]:
    """Return the statistics of a run's steps; of a long run those of some parts."""
    blocks = run.tensor_blocks
    chosen = np.unique(np.linspace(0, len(blocks) - 1, MOST_PARTS).round().astype(int))
    chosen_blocks = [blocks[index] for index in chosen] if blocks else []
    smallest = {
        name: FORMATS[dtype_of(run, index)].smallest
        for index, name in enumerate(run.names)
    }
    samples = {}
    for block in chosen_blocks:
        end = run.end - block.offset if block is blocks[-1] else block.size
        for statistics in run.statistics(block.offset, end):
            sample = _condense(statistics, smallest)
            if sample is not None:
                samples[sample.step] = sample
    return [samples[step] for step in sorted(samples)]


def _condense(statistics: Statistics, smallest: dict[str, int]) -> Sample | None:
    """Return the sample of all tensors together; `None` if it has no value.

    Args:
        statistics: Those of one step.
        smallest: The exponent of the smallest number of each tensor's format.
    """
    total = zeros = 0.0
    counts: dict[int, int] = {}
    for name, size, _, fraction, _, first, bins in statistics.tensors:
        total += size
        zeros += size * fraction
        # Half the smallest number rounds to zero, what is above that does not.
        vanished = smallest[name] - 2
        for exponent, count in _nonzero(first, bins):
            distance = exponent - vanished
            counts[distance] = counts.get(distance, 0) + count
    if not total:
        return None
    distances = sorted(counts)
    return Sample(
        statistics.step,
        statistics.scale,
        zeros / total,
        np.array(distances, np.int64),
        np.array([counts[distance] for distance in distances], np.float64) / total,
    )


def _nonzero(first: int, counts: list[int]) -> Iterator[tuple[int, int]]:
    return ((first + i, count) for i, count in enumerate(counts) if count)
