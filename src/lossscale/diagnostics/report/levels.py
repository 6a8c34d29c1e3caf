# SPDX-License-Identifier: Apache-2.0
"""What the page holds of a run's curves: all of it roughly, and parts of it finely.

A page has at most so many bytes, whatever the length of the run. It always has an
overview of the whole run. If the run is short, it has every step as well; if it is
longer, buckets of a few steps; and of a very long run, of which only the roll-up was
read, the blocks, and single steps around what went wrong. Zooming in decodes more.

Where a finer chunk holds a part of a bucket, it holds all of it. So the page can show
the finer one in its place, and each step once.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from lossscale.diagnostics.records.blocks import Block
from lossscale.diagnostics.records.columns import read_columns
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.records.steps import CAUSES
from lossscale.diagnostics.report.buckets import (
    SERIES,
    Buckets,
    fit,
    from_blocks,
    from_columns,
    power_of_two,
)
from lossscale.diagnostics.report.encoding import encode_arrays, shorten

MOST_STEPS = 1_000_000
"""The longest run whose steps are all read; of a longer one, the roll-up is. Several
runs share it."""

OVERVIEW = 2_000
"""How many buckets the overview has, at most."""

_CHUNK = 4_096
"""How many buckets are decoded together."""

_MOST_DETAILS = 160_000
"""How many buckets are tried at first: more never fit."""

_MOST_WINDOWS = 24
"""How many places of a very long run are shown step by step."""

Chunk: TypeAlias = dict[str, Any]
"""Consecutive buckets, encoded; `chunkArrays` in `assets/page.js` reads it."""


def make_levels(
    run: RunFile,
    alarm_steps: Sequence[int],
    budget: int,
    *,
    most_steps: int = MOST_STEPS,
) -> list[Chunk]:
    """Return the chunks of a run, the overview first.

    Args:
        run: The run.
        alarm_steps: Steps around which a very long run is shown step by step.
        budget: How many bytes the chunks may have together, in the page.
        most_steps: The longest run whose steps are all read.
    """
    if not run.blocks:
        return []
    if run.rows <= most_steps:
        every = from_columns(read_columns(run), run.dtype)
        return fit_chunks(every, budget)
    every = from_blocks(run.blocks)
    chunks = fit_chunks(every, budget, budget // 2)
    finest = chunks[1:] or chunks
    width = power_of_two(-(-len(every) // sum(chunk["count"] for chunk in finest)))
    left = budget - sum(map(_size, chunks))
    shown = []
    for window in _windows(run, alarm_steps, width):
        chunk = _encode(window)
        if _size(chunk) <= left:
            shown.append(chunk)
            left -= _size(chunk)
    return [*chunks, *shown]


def fit_chunks(every: Buckets, budget: int, spared: int = 0) -> list[Chunk]:
    """Return an overview, then the finest chunks that fit.

    Args:
        every: What they are of.
        budget: How many bytes the chunks may have together, in the page.
        spared: How many of these the finer ones leave.
    """
    overview = _fit_overview(every, budget)
    return [overview, *_fit_details(every, budget - spared - _size(overview))]


def _fit_overview(every: Buckets, budget: int) -> Chunk:
    """Return the whole run as one chunk; where many runs share a page, a short one."""
    buckets = fit(every, OVERVIEW)
    chunk = _encode(buckets)
    while _size(chunk) > budget and len(buckets) > _LEAST_OVERVIEW:
        buckets = buckets.merge(2)
        chunk = _encode(buckets, short=True)
    return chunk


_LEAST_OVERVIEW = 250


def _fit_details(every: Buckets, budget: int) -> list[Chunk]:
    """Return the finest chunks that fit; none if no finer than the overview."""
    details = fit(every, _MOST_DETAILS)
    is_short = len(details) == len(every)
    for short in (False, True) if is_short else (True,):
        chunks = _encode_all(details, short=short)
        if sum(map(_size, chunks)) <= budget:
            return chunks if len(details) > OVERVIEW or short else []
    while len(details) > 2 * OVERVIEW:
        details = details.merge(2)
        chunks = _encode_all(details, short=True)
        if sum(map(_size, chunks)) <= budget:
            return chunks
    return []


def _encode_all(buckets: Buckets, *, short: bool) -> list[Chunk]:
    return [
        _encode(buckets.part(start, start + _CHUNK), short=short)
        for start in range(0, len(buckets), _CHUNK)
    ]


def _encode(buckets: Buckets, *, short: bool = False) -> Chunk:
    """Return a chunk: steps, series, skips, broken losses, each one row of numbers."""
    series = [name for name in SERIES if np.isfinite(buckets.high[name]).any()]
    causes = [cause for i, cause in enumerate(CAUSES) if buckets.causes[:, i].any()]
    exact = buckets.is_exact
    gaps = np.diff(buckets.first, prepend=buckets.first[:1]).astype(np.uint32)
    rows: list[Any] = [gaps]
    if not exact:
        rows.append((buckets.last - buckets.first).astype(np.uint32))
    for name in series:
        ends = (buckets.low,) if exact else (buckets.low, buckets.high)
        rounded = short and name != "scale"
        rows += [shorten(end[name]) if rounded else end[name] for end in ends]
    rows += [buckets.causes[:, CAUSES.index(cause)] for cause in causes]
    has_broken = bool(buckets.broken.any())
    rows += [buckets.broken] if has_broken else []
    return {
        "from": int(buckets.first[0]),
        "to": int(buckets.last[-1]),
        "count": len(buckets),
        "exact": exact,
        "series": series,
        "causes": causes,
        "broken": has_broken,
        "data": encode_arrays(rows),
    }


def _size(chunk: Chunk) -> int:
    """Return how many bytes a chunk has in the page, roughly."""
    return len(chunk["data"]) + 200


def _windows(run: RunFile, alarm_steps: Sequence[int], width: int) -> Iterator[Buckets]:
    """Yield the blocks of a very long run that are shown step by step."""
    for start, end in _around(run.blocks, alarm_steps, width):
        yield from_columns(read_columns(run, run.blocks[start:end]), run.dtype)


def _around(
    blocks: Sequence[Block], alarm_steps: Sequence[int], width: int
) -> list[tuple[int, int]]:
    """Return which blocks: those of alarms, the two ends, and those with skips.

    Args:
        blocks: Those of the run.
        alarm_steps: The steps of its alarms.
        width: How many blocks the finest bucket has: all of them are taken, or none.
    """
    firsts = [block.first for block in blocks]
    wanted = [int(np.searchsorted(firsts, s, side="right")) - 1 for s in alarm_steps]
    wanted += [len(blocks) - 1, 0]
    worst = sorted(range(len(blocks)), key=lambda i: -blocks[i].skipped)
    wanted += [index for index in worst[:_MOST_WINDOWS] if blocks[index].skipped]
    chosen: set[int] = set()
    for index in wanted:
        if len(chosen) >= _MOST_WINDOWS:
            break
        # What led to it is in the block before.
        for one in (max(0, index - 1), max(0, index)):
            start = one - one % width
            chosen |= {*range(start, min(start + width, len(blocks)))}
    return _joined(sorted(chosen))


def _joined(indexes: list[int]) -> list[tuple[int, int]]:
    """Return ranges that cover indexes."""
    ranges: list[tuple[int, int]] = []
    for index in indexes:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges
