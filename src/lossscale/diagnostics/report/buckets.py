# SPDX-License-Identifier: Apache-2.0
"""Runs of any length as a few thousand buckets, each with its smallest and largest.

A bucket keeps the extremes of every series, so that a spike of one step is seen at
every width. A bucket is one step at first, or a block of a run's roll-up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lossscale.diagnostics.records.blocks import Block
from lossscale.diagnostics.records.columns import Columns
from lossscale.diagnostics.records.steps import CAUSES

SERIES = ("scale", "loss", "norm", "headroom", "clip", "lr")
"""What is drawn, in the order in which the page has it."""

Floats = npt.NDArray[np.float32]
Steps = npt.NDArray[np.int64]
Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Buckets:
    """Consecutive steps in groups."""

    first: Steps
    """The first step of each bucket."""
    last: Steps
    """The last step of each bucket."""
    low: dict[str, Floats]
    """The smallest value of each series; NaN where there is none."""
    high: dict[str, Floats]
    """The largest value of each series."""
    causes: Counts
    """How many steps were skipped, by cause, in the order of `CAUSES`."""
    broken: Counts
    """How many steps had a loss that was not finite."""

    def __len__(self) -> int:
        """Return how many buckets there are."""
        return self.first.size

    @property
    def is_exact(self) -> bool:
        """Whether every bucket is one step."""
        return bool((self.first == self.last).all())

    def merge(self, count: int) -> "Buckets":
        """Return so many buckets in a row as one each."""
        if count <= 1 or not len(self):
            return self
        starts = np.arange(0, len(self), count)
        ends = np.append(starts[1:], len(self)) - 1
        return Buckets(
            first=self.first[starts],
            last=self.last[ends],
            low={n: np.fmin.reduceat(v, starts) for n, v in self.low.items()},
            high={n: np.fmax.reduceat(v, starts) for n, v in self.high.items()},
            causes=np.add.reduceat(self.causes, starts, axis=0, dtype=np.uint32),
            broken=np.add.reduceat(self.broken, starts, dtype=np.uint32),
        )

    def part(self, start: int, end: int) -> "Buckets":
        """Return the buckets from one index to another."""
        return Buckets(
            first=self.first[start:end],
            last=self.last[start:end],
            low={name: values[start:end] for name, values in self.low.items()},
            high={name: values[start:end] for name, values in self.high.items()},
            causes=self.causes[start:end],
            broken=self.broken[start:end],
        )


def from_columns(columns: Columns, dtype: str) -> Buckets:
    """Return one bucket per step."""
    series = {
        "scale": columns.scale,
        "loss": columns.loss,
        "norm": columns.norm,
        "headroom": columns.headroom(dtype),
        "clip": np.where(columns.cause == 0, columns.clip, np.nan),
        "lr": columns.lr,
    }
    with np.errstate(over="ignore"):
        values = {name: _finite(column) for name, column in series.items()}
    causes = np.zeros((columns.step.size, len(CAUSES)), np.uint32)
    rows = np.flatnonzero(columns.cause)
    causes[rows, columns.cause[rows] - 1] = 1
    broken = np.isinf(columns.loss).astype(np.uint32)
    return Buckets(columns.step, columns.step, values, values, causes, broken)


def from_blocks(blocks: Sequence[Block]) -> Buckets:
    """Return one bucket per block of a roll-up."""
    low, high = (
        {
            name: _finite(
                np.array(
                    [
                        getattr(block.series[name], end)
                        if name in block.series
                        else np.nan
                        for block in blocks
                    ],
                    np.float64,
                )
            )
            for name in SERIES
        }
        for end in ("low", "high")
    )
    losses = [block.series.get("loss") for block in blocks]
    broken = [0 if loss is None else loss.nonfinite for loss in losses]
    counts = [[block.causes.get(cause, 0) for cause in CAUSES] for block in blocks]
    return Buckets(
        first=np.array([block.first for block in blocks], np.int64),
        last=np.array([block.last for block in blocks], np.int64),
        low=low,
        high=high,
        causes=np.array(counts, np.uint32).reshape(len(blocks), len(CAUSES)),
        broken=np.array(broken, np.uint32),
    )


def _finite(values: npt.NDArray[np.float64]) -> Floats:
    """Return values as float32; what is not finite there becomes NaN."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    narrow[~np.isfinite(narrow)] = np.nan
    return narrow


def fit(buckets: Buckets, most: int) -> Buckets:
    """Return at most so many buckets of equal width, each of a power of two.

    So wide ones begin where narrow ones do: see `levels.py`.
    """
    return buckets.merge(power_of_two(-(-len(buckets) // most)))


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << max(0, least - 1).bit_length()
