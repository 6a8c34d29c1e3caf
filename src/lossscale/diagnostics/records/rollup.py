# SPDX-License-Identifier: Apache-2.0
"""The roll-up of a run: one row per 1,024 steps, in a file next to the run's own.

A report over ten million steps reads ten thousand of these rows, and of the steps
themselves only those that it shows one by one: each row says where in the run's file
its steps are. Lines of the run that are neither steps nor statistics are repeated here.

    {"format":"lossscale-rollup/1","run":"5f0c..."}
    [first, last, offset, bytes, ...]                      the fields of `Block`
    {"tensors":[first, last, offset, bytes, ...]}          the fields of `TensorBlock`

Everything here can be computed again from the run. Imports the standard library only.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lossscale.diagnostics.records.blocks import (
    BLOCK_STEPS,
    SERIES,
    Block,
    Overflows,
    Series,
    TensorBlock,
    TensorRow,
)
from lossscale.diagnostics.records.statistics_line import decode_statistics
from lossscale.diagnostics.records.steps import CAUSES

ROLLUP_FORMAT = "lossscale-rollup/1"
"""The format of the file next to the run."""


def encode_block(block: Block, positions: Mapping[str, int]) -> list[Any]:
    """Return the row of a block."""
    *numbers, series, causes, skips, tensors = block
    return [
        *numbers,
        {
            name: [_or_none(s.low), _or_none(s.high), s.total, s.finite, s.nonfinite]
            for name, s in series.items()
        },
        causes,
        skips,
        [[positions[name], *counts] for name, *counts in tensors],
    ]


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def decode_block(row: Any, names: Sequence[str]) -> Block | None:
    """Return the block that a parsed line holds; `None` if it does not hold one."""
    try:
        *numbers, series, causes, skips, tensors = row
        first, last, offset, size, rows, applied, clipped, growths, backoffs = map(
            _whole, numbers[:9]
        )
        start, end, first_scale, last_scale = map(_finite, numbers[9:])
        if not (first <= last and 1 <= rows <= BLOCK_STEPS and size):
            return None
        return Block(
            *(first, last, offset, size, rows, applied, clipped, growths, backoffs),
            *(start, end, first_scale, last_scale),
            series={
                name: _decode_series(values)
                for name, values in series.items()
                if name in SERIES
            },
            causes={name: _whole(n) for name, n in causes.items() if name in CAUSES},
            skips=tuple(
                (_whole(step), cause) for step, cause in skips if cause in CAUSES
            ),
            tensors=tuple(
                Overflows(names[_whole(index)], *map(_whole, counts))
                for index, *counts in tensors
            ),
        )
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError):
        return None


def _decode_series(values: Any) -> Series:
    low, high, total, count, nonfinite = values
    return Series(
        math.nan if low is None else _finite(low),
        math.nan if high is None else _finite(high),
        _finite(total),
        _whole(count),
        _whole(nonfinite),
    )


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError
    return value


def _finite(value: Any) -> float:
    if (type(value) is not int and type(value) is not float) or not math.isfinite(
        value
    ):
        raise ValueError
    return float(value)


def read_extremes(
    event: Any, names: Sequence[str], positions: Mapping[str, int]
) -> tuple[int, list[TensorRow]] | None:
    """Return what `BlockBuilder.add_statistics` takes, from a line of statistics."""
    found = decode_statistics(event, names)
    if found is None:
        return None
    return found.step, [
        (positions[name], amax, zeros + subnormals)
        for name, _, amax, zeros, subnormals, *_ in found.tensors
    ]


def decode_tensor_block(value: Any) -> TensorBlock | None:
    """Return the row of tensors that a parsed line holds, or `None`."""
    try:
        first, last, offset, size, samples, amax, lost = value
        return TensorBlock(
            _whole(first),
            _whole(last),
            _whole(offset),
            _whole(size),
            _whole(samples),
            [None if entry is None else _finite(entry) for entry in amax],
            [None if entry is None else _finite(entry) for entry in lost],
        )
    except (OverflowError, TypeError, ValueError):
        return None
