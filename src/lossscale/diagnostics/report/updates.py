# SPDX-License-Identifier: Apache-2.0
"""What a report says about the updates of the weights: those that stand out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.records.statistics_line import Statistics, UpdateRow
from lossscale.diagnostics.report.wording import NOTHING, number, percent

HEADS = ("tensor", "format", "float32 master", "update / weight", "rounded away")
"""The columns of the table."""

_EACH = 5
"""How many tensors are listed for each extreme."""

_BLOCKS = 4
"""In how many blocks, from the end of the run, a step with updates is searched."""

_HALF = ("float16", "bfloat16")
_MOST = 0.5


class Updates(NamedTuple):
    """The updates of the last step for which they were measured."""

    step: int
    tensors: int
    """How many were measured."""
    rows: tuple[UpdateRow, ...]
    """Those of which most was rounded away, and those with the largest and smallest
    ratio of update to weight."""
    unkept: int
    """How many 16-bit tensors without a master kept less than half of their update."""
    worst: UpdateRow | None
    """The one of these that kept least."""

    def as_json(self) -> dict[str, Any]:
        """Return it as strict JSON holds it."""
        values = self._asdict()
        values["rows"] = [row._asdict() for row in self.rows]
        values["worst"] = None if self.worst is None else self.worst._asdict()
        return values


def summarize_updates(run: RunFile) -> Updates | None:
    """Return which of the last updates stand out; `None` if none was measured."""
    sample = _find_last(run)
    if sample is None or not sample.updates:
        return None
    rows = sample.updates
    unkept = [
        row
        for row in rows
        if row.dtype in _HALF and not row.has_master and row.lost > _MOST
    ]
    return Updates(
        sample.step,
        len(rows),
        tuple(_choose(rows)),
        len(unkept),
        max(unkept, key=lambda row: row.lost, default=None),
    )


def _find_last(run: RunFile) -> Statistics | None:
    """Return the last statistics that have updates; a skipped step has none."""
    stop = run.end
    for block in reversed(run.tensor_blocks[-_BLOCKS:]):
        found = [s for s in run.statistics(block.offset, stop - block.offset) if s[3]]
        if found:
            return found[-1]
        stop = block.offset
    return None


def _choose(rows: Sequence[UpdateRow]) -> list[UpdateRow]:
    """Return the rows that stand out, those that lost most first; all if few."""
    if len(rows) <= 3 * _EACH:
        return sorted(rows, key=_order)
    known = sorted(
        (row for row in rows if row.ratio is not None), key=lambda row: row.ratio or 0.0
    )
    most_lost = sorted((row for row in rows if row.lost), key=lambda row: -row.lost)
    chosen = dict.fromkeys([*most_lost[:_EACH], *known[-_EACH:], *known[:_EACH]])
    return sorted(chosen, key=_order)


def _order(row: UpdateRow) -> tuple[float, float]:
    return -row.lost, -(row.ratio or 0.0)


def describe(updates: Updates) -> str:
    """Return a sentence on what the table says."""
    shown = len(updates.rows)
    some = f"{shown} of {updates.tensors:,} tensors" if shown < updates.tensors else ""
    which = f" ({some}, those that stand out)" if some else ""
    return (
        f"What step {updates.step:,} added to the weights{which}: the norm of the "
        "update divided by that of the weight, and the share of the weight's numbers "
        "that did not change because their update was rounded away in the weight's "
        "format; a float32 master keeps such updates."
    )


def cells(updates: Updates) -> list[list[str]]:
    """Return the rows of the table as text."""
    return [
        [
            row.name,
            row.dtype,
            "yes" if row.has_master else "no",
            NOTHING if row.ratio is None else number(row.ratio),
            percent(row.lost),
        ]
        for row in updates.rows
    ]
