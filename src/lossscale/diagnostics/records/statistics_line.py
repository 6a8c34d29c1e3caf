# SPDX-License-Identifier: Apache-2.0
"""The line of a step's statistics: how it is written, and read again.

    {"statistics":{"step":51,"scale":32768,"tensors":[[0,64,0.5,0,0.25,-24,[3,9]]],
     "updates":[[0,0.0012,0.25,"float16",1]]}}

A row of `tensors` has index, size, amax, zeros, subnormals, first exponent and counts.
A row of `updates` has index, ratio, lost, format, and whether there is a master; the
key is missing where no update was measured. What is not finite is null. Reading checks
every value. Imports the standard library only.
"""

import math
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from lossscale.core.statistics import TensorStatistics, UpdateStatistics
from lossscale.diagnostics.records.layout import (
    DTYPES,
    END,
    MOST_TENSORS,
    encode,
    is_number,
    name_at,
)

MOST_BINS = 4_096


class UpdateRow(NamedTuple):
    """What a step has added to one weight, as `UpdateStatistics` describes it."""

    name: str
    ratio: float | None
    """`None` if it was not finite."""
    lost: float
    dtype: str
    has_master: bool


class Statistics(NamedTuple):
    """The statistics of one step, as `TensorStatistics` describes them."""

    step: int
    scale: float
    """The scale that the gradients carried."""
    tensors: list[list[Any]]
    """Rows of name, size, amax, zeros, subnormals, first exponent and counts."""
    updates: list[UpdateRow] | None = None
    """What the step has added to the weights; `None` if that was not measured."""


def encode_statistics(
    statistics: TensorStatistics,
    positions: Mapping[str, int],
    *,
    step: int,
    scale: float,
) -> str:
    """Return the line of a step's statistics, without its end."""
    rows = []
    columns = (
        as_list(statistics.sizes),
        as_list(statistics.amax),
        as_list(statistics.zeros),
        as_list(statistics.subnormals),
        as_list(statistics.counts),
    )
    first_exponent = int(statistics.first_exponent)
    for name, size, amax, zeros, subnormals, counts in zip(
        statistics.names, *columns, strict=True
    ):
        start, trimmed = _trim(as_list(counts))
        row = [positions[name], int(size), *map(_six_digits, (amax, zeros, subnormals))]
        rows.append([*row, first_exponent + start, trimmed])
    line: dict[str, Any] = {"step": step, "scale": scale, "tensors": rows}
    if statistics.updates is not None:
        line["updates"] = _encode_updates(statistics.updates, positions)
    return encode({"statistics": line})


def _encode_updates(
    updates: UpdateStatistics, positions: Mapping[str, int]
) -> list[list[Any]]:
    columns = map(as_list, updates[1:])
    return [
        [
            positions[name],
            _six_digits(ratio),
            _six_digits(lost) or 0.0,
            str(dtype),
            int(has_master),
        ]
        for name, ratio, lost, dtype, has_master in zip(
            updates.names, *columns, strict=True
        )
    ]


def as_list(values: Any) -> list[Any]:
    """Return a sequence, array or tensor as a list of Python numbers."""
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _six_digits(value: Any) -> float | None:
    number = float(value)
    return float(f"{number:.6g}") if isfinite(number) else None


def _trim(counts: list[Any]) -> tuple[int, list[int]]:
    """Return a histogram without the empty bins at its ends, and how many came first.

    Without any count it is empty.
    """
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return 0, []
    first, last = filled[0], filled[-1]
    return first, [int(count) for count in counts[first : last + 1]]


def decode_statistics(event: Any, names: Sequence[str]) -> Statistics | None:
    """Return what a line of statistics holds; `None` if it is malformed."""
    try:
        step, scale, rows = event["step"], float(event["scale"]), event["tensors"]
        checked = [_check_tensor(row, names) for row in rows]
        updates = event.get("updates")
        if updates is not None:
            updates = _check_updates(updates, names)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    usable = type(step) is int and 0 <= step < END and 0.0 < scale < math.inf
    return Statistics(step, scale, checked, updates) if usable else None


def _check_tensor(row: Any, names: Sequence[str]) -> list[Any]:
    index, size, amax, zeros, subnormals, first, counts = row
    numbers = [0.0 if value is None else value for value in (amax, zeros, subnormals)]
    whole = [size, *counts]
    if (
        not isinstance(counts, list)
        or len(counts) > MOST_BINS
        or type(first) is not int
        or not -MOST_BINS < first < MOST_BINS
        or any(type(value) is not int or not 0 <= value < END for value in whole)
        or any(not is_number(value) or not 0 <= value < math.inf for value in numbers)
    ):
        raise ValueError
    return [name_at(index, names), size, *map(float, numbers), first, counts]


def _check_updates(rows: Any, names: Sequence[str]) -> list[UpdateRow]:
    if not isinstance(rows, list) or len(rows) > MOST_TENSORS:
        raise ValueError
    return [_check_update(row, names) for row in rows]


def _check_update(row: Any, names: Sequence[str]) -> UpdateRow:
    index, ratio, lost, dtype, has_master = row
    usable = (
        (ratio is None or (is_number(ratio) and 0 <= ratio < math.inf))
        and is_number(lost)
        and 0 <= lost <= 1
        and dtype in DTYPES
        and type(has_master) is int
        and has_master in (0, 1)
    )
    if not usable:
        raise ValueError
    known = None if ratio is None else float(ratio)
    return UpdateRow(name_at(index, names), known, float(lost), dtype, bool(has_master))
