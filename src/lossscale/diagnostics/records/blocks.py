# SPDX-License-Identifier: Apache-2.0
"""Blocks: 1,024 consecutive steps of a run, summed up.

The roll-up next to a run has one row per block, and reports are drawn from them.
Imports the standard library only.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from lossscale.diagnostics.formats import headroom
from lossscale.diagnostics.records.steps import CAUSES, StepRecord

BLOCK_STEPS = 1_024
"""How many steps one row represents, at most."""

TENSOR_BLOCKS = 4
"""How many blocks one row of tensors represents."""

MOST_SKIPS = 32
"""How many skipped steps a row lists one by one."""


class Series(NamedTuple):
    """What is left of the values of one column: enough to draw them."""

    low: float
    high: float
    total: float
    finite: int
    """How many values were finite."""
    nonfinite: int = 0
    """How many were infinite or NaN."""

    @property
    def mean(self) -> float:
        """The mean of the finite values; NaN if there is none."""
        return self.total / self.finite if self.finite else math.nan


class Overflows(NamedTuple):
    """How often one tensor kept a step from being applied."""

    name: str
    inf: int
    nan: int
    headroom: int
    first: int
    last: int


SERIES = ("scale", "norm", "clip", "amax", "loss", "lr", "headroom")
"""The columns of which a block keeps a `Series`."""


class Block(NamedTuple):
    """Consecutive steps of a run, summed up."""

    first: int
    """The first step."""
    last: int
    """The last step."""
    offset: int
    """Where in the run's file its lines start."""
    size: int
    """How many bytes they have."""
    rows: int
    applied: int
    clipped: int
    growths: int
    backoffs: int
    start: float
    """The time of the first step."""
    end: float
    """The time of the last step."""
    first_scale: float
    last_scale: float
    series: dict[str, Series]
    """A `Series` for each measured column of `SERIES`."""
    causes: dict[str, int]
    """How many steps were skipped, by cause."""
    skips: tuple[tuple[int, str], ...]
    """The first skipped steps, each with its cause."""
    tensors: tuple[Overflows, ...]

    @property
    def skipped(self) -> int:
        """How many steps were not applied."""
        return self.rows - self.applied


class TensorBlock(NamedTuple):
    """The extremes of every tensor's statistics over some blocks."""

    first: int
    last: int
    offset: int
    """Where in the run's file its lines start."""
    size: int
    """How many bytes they have."""
    samples: int
    """How many steps were measured."""
    amax: list[float | None]
    """The largest stored magnitude of each tensor, by its index among the names."""
    lost: list[float | None]
    """The largest share of each that was zero or subnormal."""


TensorRow: TypeAlias = tuple[int, float, float]
"""A tensor's index, its largest stored magnitude, and the share of it that was lost."""


def summarize(
    records: Sequence[StepRecord],
    *,
    offset: int,
    size: int,
    dtype: str,
    last_scale: float | None,
) -> Block:
    """Sum up consecutive steps.

    Args:
        records: The steps, at least one.
        offset: Where in the run's file their lines start.
        size: How many bytes these have.
        dtype: The format of the stored gradients.
        last_scale: The scale of the step before, if there is one.
    """
    scales = [record.scale for record in records]
    columns: dict[str, Sequence[float | None]] = {
        "scale": scales,
        "norm": [record.norm for record in records],
        # A skipped step clipped nothing, whatever its factor.
        "clip": [record.clip if record.applied else None for record in records],
        "amax": [record.amax for record in records],
        "loss": [record.loss for record in records],
        "lr": [record.lr for record in records],
        "headroom": [
            None if record.amax is None else headroom(record.amax, record.scale, dtype)
            for record in records
        ],
    }
    found = {name: _reduce(values) for name, values in columns.items()}
    skipped = [record for record in records if not record.applied]
    before = [scales[0] if last_scale is None else last_scale, *scales[:-1]]
    moves = [
        (now > then) - (now < then) for now, then in zip(scales, before, strict=True)
    ]
    return Block(
        first=records[0].step,
        last=records[-1].step,
        offset=offset,
        size=size,
        rows=len(records),
        applied=len(records) - len(skipped),
        clipped=sum(clip is not None and clip < 1.0 for clip in columns["clip"]),
        growths=moves.count(1),
        backoffs=moves.count(-1),
        start=records[0].time,
        end=records[-1].time,
        first_scale=records[0].scale,
        last_scale=records[-1].scale,
        series={name: series for name, series in found.items() if series is not None},
        causes=_count_causes(skipped),
        skips=tuple((r.step, r.cause or "inf") for r in skipped[:MOST_SKIPS]),
        tensors=count_overflows(skipped),
    )


def _reduce(values: Iterable[float | None]) -> Series | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    finite = [value for value in known if math.isfinite(value)]
    nonfinite = len(known) - len(finite)
    if not finite:
        return Series(math.nan, math.nan, 0.0, 0, nonfinite)
    return Series(min(finite), max(finite), math.fsum(finite), len(finite), nonfinite)


def _count_causes(skipped: Sequence[StepRecord]) -> dict[str, int]:
    causes = [record.cause or "inf" for record in skipped]
    return {cause: causes.count(cause) for cause in CAUSES if cause in causes}


def count_overflows(skipped: Iterable[StepRecord]) -> tuple[Overflows, ...]:
    """Return how often each tensor kept a step from being applied."""
    found: dict[str, Overflows] = {}
    for record in skipped:
        for name, cause in record.nonfinite:
            one = Overflows(
                name,
                int(cause == "inf"),
                int(cause == "nan"),
                int(cause not in ("inf", "nan")),
                record.step,
                record.step,
            )
            found[name] = add_overflows(found[name], one) if name in found else one
    return tuple(found.values())


def add_overflows(one: Overflows, other: Overflows) -> Overflows:
    """Return the sum of two counts of one tensor."""
    return Overflows(
        one.name,
        one.inf + other.inf,
        one.nan + other.nan,
        one.headroom + other.headroom,
        min(one.first, other.first),
        max(one.last, other.last),
    )


class _TensorExtremes:
    """Collects the statistics of steps until a row of tensors is full."""

    def __init__(self) -> None:
        self.first = self.last = self.samples = self.blocks = 0
        self._amax: dict[int, float] = {}
        self._lost: dict[int, float] = {}

    def add(self, step: int, rows: Iterable[TensorRow]) -> None:
        """Take the statistics of a step."""
        self.first = self.first if self.samples else step
        self.last = step
        self.samples += 1
        for index, amax, lost in rows:
            self._amax[index] = max(self._amax.get(index, 0.0), amax)
            self._lost[index] = max(self._lost.get(index, 0.0), lost)

    def finish(self, offset: int, size: int) -> TensorBlock:
        """Return what was collected."""
        end = max(self._amax, default=-1) + 1
        amax = [self._amax.get(index) for index in range(end)]
        lost = [self._lost.get(index) for index in range(end)]
        return TensorBlock(
            self.first, self.last, offset, size, self.samples, amax, lost
        )


class BlockBuilder:
    """Makes blocks of a run's lines, as they are written or as they are read again.

    Every byte from the first offset on belongs to exactly one block: that of the next
    step which follows it, or of the last.
    """

    def __init__(
        self, *, dtype: str, offset: int, last_scale: float | None = None
    ) -> None:
        self._dtype = dtype
        self._last_scale = last_scale
        self._offset = offset
        self._size = 0
        self._records: list[StepRecord] = []
        self._tensors = _TensorExtremes()
        self._tensors_offset = offset
        self._finished: list[Block | TensorBlock] = []

    @property
    def pending(self) -> Sequence[StepRecord]:
        """The steps of the block that is not finished."""
        return self._records

    def add_step(self, record: StepRecord, size: int) -> None:
        """Take a step whose line has so many bytes."""
        self._records.append(record)
        self._size += size
        if len(self._records) == BLOCK_STEPS:
            self._finish_block()

    def add_line(self, size: int) -> None:
        """Take a line that is not a step."""
        self._size += size

    def add_statistics(self, step: int, rows: Iterable[TensorRow], size: int) -> None:
        """Take the statistics of a step."""
        self._size += size
        self._tensors.add(step, rows)

    def close(self) -> None:
        """Finish what is incomplete: the run ends here, or was resumed here."""
        if self._records:
            self._finish_block()
        self._finish_tensors()

    def take(self) -> list[Block | TensorBlock]:
        """Return what was finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _finish_block(self) -> None:
        block = summarize(
            self._records,
            offset=self._offset,
            size=self._size,
            dtype=self._dtype,
            last_scale=self._last_scale,
        )
        self._finished.append(block)
        self._last_scale = block.last_scale
        self._offset += self._size
        self._size = 0
        self._records = []
        self._tensors.blocks += 1
        if self._tensors.blocks == TENSOR_BLOCKS:
            self._finish_tensors()

    def _finish_tensors(self) -> None:
        size = self._offset - self._tensors_offset
        if self._tensors.samples and size:
            self._finished.append(self._tensors.finish(self._tensors_offset, size))
        self._tensors = _TensorExtremes()
        self._tensors_offset = self._offset
