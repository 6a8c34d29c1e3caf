# SPDX-License-Identifier: Apache-2.0
"""Read many steps of a run as NumPy columns.

Most lines are nothing but numbers. Those are parsed together by NumPy, several times
faster than one by one; the others go through the reader like everywhere else.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.records.blocks import Block
from lossscale.diagnostics.records.layout import decode_step
from lossscale.diagnostics.records.lines import read_lines
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.records.steps import CAUSES, StepRecord

Floats = npt.NDArray[np.float64]

_NUMBERS = ("step", "time", "scale", "applied", "norm", "clip", "amax", "loss", "lr")
_PLAIN_COMMAS = len(_NUMBERS) - 1


@dataclass(frozen=True, eq=False)
class Columns:
    """Steps of a run, column by column; NaN where something was not measured."""

    step: npt.NDArray[np.int64]
    time: Floats
    scale: Floats
    norm: Floats
    clip: Floats
    amax: Floats
    loss: Floats
    """A loss that was recorded as NaN is infinite here: it was measured."""
    lr: Floats
    cause: npt.NDArray[np.uint8]
    """0 if the step was applied, else one more than its place in `CAUSES`."""

    def headroom(self, dtype: str) -> Floats:
        """Return how often each step's gradients could double; NaN if not known."""
        with np.errstate(divide="ignore", invalid="ignore"):
            stored = np.log2(self.amax) + np.log2(self.scale)
        left = np.log2(FORMATS[dtype].largest) - stored
        found: Floats = np.where(np.isfinite(left), left, np.nan)
        return found


def read_columns(run: RunFile, blocks: Iterable[Block] | None = None) -> Columns:
    """Read the steps of some blocks of a run.

    Args:
        run: The run.
        blocks: Those to read; by default all of them.
    """
    tables = []
    with run.path.open("rb") as file:
        for block in run.blocks if blocks is None else blocks:
            table = _read_block(run, file, block)
            kept = (table[:, 0] >= block.first) & (table[:, 0] <= block.last)
            tables.append(table[kept])
    width = len(_NUMBERS) + 1
    table = np.concatenate(tables) if tables else np.zeros((0, width))
    values = {name: table[:, i].copy() for i, name in enumerate((*_NUMBERS, "cause"))}
    step = values.pop("step").astype(np.int64)
    cause = values.pop("cause").astype(np.uint8)
    del values["applied"]
    return Columns(step=step, cause=cause, **values)


def _read_block(run: RunFile, file: BinaryIO, block: Block) -> Floats:
    """Return the steps of a block in their order: the numbers, then the cause."""
    file.seek(block.offset)
    lines = file.read(block.size).split(b"\n")
    plain = [_is_plain(line) for line in lines]
    table = _parse_plain([line for line, yes in zip(lines, plain, strict=True) if yes])
    if table is None:
        return _read_slowly(run, file, block)
    others = [line for line, yes in zip(lines, plain, strict=True) if line and not yes]
    records = [decode_step(value, run.names) for value in _parse_others(others)]
    rest = _as_table([record for record in records if record is not None])
    both = np.concatenate([table, rest])
    return both[np.argsort(both[:, 0], kind="stable")]


def _is_plain(line: bytes) -> bool:
    """Whether a line is an applied step of numbers alone."""
    return (
        line[:1] == b"["
        and line[-1:] == b"]"
        and line.count(b",") == _PLAIN_COMMAS
        and not line.strip(b"[]0123456789,.e+-")
    )


def _parse_plain(lines: list[bytes]) -> Floats | None:
    """Return plain steps as a table; `None` if they are not what they seem to be."""
    text = b",".join([line[1:-1] for line in lines])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            numbers = np.fromstring(text, np.float64, sep=",")
        except (ValueError, DeprecationWarning):
            return None
    if numbers.size != len(lines) * len(_NUMBERS):
        return None
    table = numbers.reshape(len(lines), len(_NUMBERS))
    usable = (
        (table[:, 0] % 1 == 0)
        & (table[:, 0] >= 0)
        & np.isfinite(table).all(axis=1)
        & (table[:, 2] > 0)
        & (table[:, 3] == 1)
    )
    if not usable.all():
        return None
    return np.column_stack([table, np.zeros(len(lines))])


def _parse_others(lines: list[bytes]) -> list[Any]:
    text = b"\n".join(lines)
    found = read_lines(BytesIO(text), 0, len(text), prefix=b"[")
    return [line.value for line in found]


def _read_slowly(run: RunFile, file: BinaryIO, block: Block) -> Floats:
    lines = read_lines(file, block.offset, block.offset + block.size)
    records = [decode_step(line.value, run.names) for line in lines]
    return _as_table([record for record in records if record is not None])


def _as_table(records: list[StepRecord]) -> Floats:
    table = np.full((len(records), len(_NUMBERS) + 1), np.nan)
    for row, record in zip(table, records, strict=True):
        row[:-1] = [
            np.nan if value is None else value for value in record[: len(_NUMBERS)]
        ]
        if record.loss is not None and np.isnan(record.loss):
            row[_NUMBERS.index("loss")] = np.inf
        row[-1] = 0 if record.applied else 1 + CAUSES.index(record.cause or "inf")
    return table
