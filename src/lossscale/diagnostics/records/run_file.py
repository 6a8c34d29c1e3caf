# SPDX-License-Identifier: Apache-2.0
"""`RunFile`: what is known of a recorded run; its single steps stay on the disk.

Imports the standard library only.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lossscale.diagnostics.records.blocks import (
    Block,
    TensorBlock,
    summarize,
)
from lossscale.diagnostics.records.layout import Event, decode_step
from lossscale.diagnostics.records.lines import read_lines
from lossscale.diagnostics.records.statistics_line import (
    Statistics,
    decode_statistics,
)
from lossscale.diagnostics.records.steps import StepRecord


class RecordWarning(UserWarning):
    """A part of a recorded run could not be read, or not be written."""


class Malformed(NamedTuple):
    """How much of a run could not be read."""

    lines: int = 0
    first_offset: int = 0


class RunFile:
    """A recorded run: everything but its single steps, which stay on the disk.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale.diagnostics import Recorder, read_run
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path) as recorder:
        ...         recorder.record(scale=65536.0, applied=False, cause="inf")
        ...         recorder.record(scale=32768.0, applied=True, loss=2.3)
        ...     run = read_run(path)
        ...     [(record.step, record.applied) for record in run.records()]
        [(1, False), (2, True)]
    """

    def __init__(self, path: Path, header: dict[str, Any], start: int) -> None:
        """Start with nothing but the header; `read_run` reads the rest."""
        self.path = path
        """The run's file."""
        self.header = header
        """Its first line: versions, device, policy, dtype and names. What that left
        open is as a framework described it later."""
        self.start = start
        """Where its second line starts."""
        self.end = start
        """How many of its bytes were read."""
        self.header_names: list[str] = list(header["names"])
        """The names in the file's first line; the other lines add to them."""
        self.names: list[str] = list(self.header_names)
        """Every tensor, in the model's order."""
        self.blocks: list[Block] = []
        """The steps, summed up. Where a run was resumed from an earlier step, the steps
        that it took again are here once: as it took them last."""
        self.tensor_blocks: list[TensorBlock] = []
        """The extremes of the statistics, as far as they are rolled up."""
        self.events: list[Event] = []
        """The lines that are not steps: resumed, alarm, closed. The alarms of steps
        that were taken again are not here."""
        self.malformed = Malformed()
        """The lines that could not be read."""
        self.rolled_up = start
        """How many bytes of the run the roll-up next to it covers."""
        self.finished: list[Block | TensorBlock] = []
        """What the roll-up next to it lacks."""

    @property
    def dtype(self) -> str:
        """The format in which gradients were stored."""
        return str(self.header["dtype"])

    @cached_property
    def dtypes(self) -> list[str]:
        """The format that limits each tensor's gradient, as far as that is known.

        Where none is stored in the run's format, as with float32 weights under
        autocast, the gradients went through the run's format before.
        """
        found = self.header.get("dtypes") or []
        return found if self.dtype in found else []

    @property
    def device(self) -> str:
        """What the run was on; the processor, if nothing else is known."""
        header = self.header
        return str(header.get("device") or header.get("processor") or "unknown")

    @property
    def title(self) -> str:
        """What to call the run: the name it was given, or that of its file."""
        return str(self.header.get("name") or self.path.stem)

    @property
    def rows(self) -> int:
        """How many steps there are."""
        return sum(block.rows for block in self.blocks)

    @property
    def last_step(self) -> int | None:
        """The last step; `None` if there is none."""
        return self.blocks[-1].last if self.blocks else None

    def events_of(self, kind: str) -> list[Any]:
        """Return what the lines of one kind hold, such as "alarm"."""
        return [event[kind] for event in self.events if kind in event]

    def records(
        self, first: int | None = None, last: int | None = None
    ) -> Iterator[StepRecord]:
        """Yield steps, decoded from the run's file.

        Args:
            first: The first of them; by default the run's.
            last: The last of them; by default the run's.
        """
        low = -1 if first is None else first
        high = 2**53 if last is None else last
        with self.path.open("rb") as file:
            for block in self.blocks:
                if block.first <= high and block.last >= low:
                    for record in self._records_of(file, block):
                        if low <= record.step <= high:
                            yield record

    def statistics(self, offset: int, size: int) -> Iterator[Statistics]:
        """Yield the statistics in a part of the file, such as that of a block."""
        with self.path.open("rb") as file:
            # The name of the key is enough to leave out the steps without parsing them.
            for line in read_lines(
                file, offset, offset + size, prefix=b'{"statistics"'
            ):
                if isinstance(line.value, dict):
                    found = decode_statistics(line.value["statistics"], self.names)
                    if found is not None:
                        yield found

    def _records_of(self, file: BinaryIO, block: Block) -> Iterator[StepRecord]:
        """Yield the steps of a block that no later one replaced."""
        for line in read_lines(file, block.offset, block.offset + block.size):
            if isinstance(line.value, list):
                record = decode_step(line.value, self.names)
                if record is not None and block.first <= record.step <= block.last:
                    yield record

    def replace_repeated(self) -> None:
        """Leave out what the run took again after it was resumed from an earlier step.

        That is its steps, and the alarms that they raised.
        """
        self.events = _without_replaced_alarms(self.events)
        written, self.blocks = self.blocks, []
        for index, limit in _find_kept(written):
            before = written[index - 1] if index else None
            block: Block | None = written[index]
            if written[index].last >= limit:
                block = self._cut(written[index], limit, before)
            if block is not None:
                follows = self.blocks[-1] if self.blocks else None
                self.blocks.append(_compare(block, before, follows))

    def _cut(self, block: Block, limit: int, before: Block | None) -> Block | None:
        """Return a block without its steps from a limit on; `None` if it has no others.

        Args:
            block: Sums up steps before the limit as well.
            limit: The first step that is left out.
            before: The block that was written before it.
        """
        records = []
        with self.path.open("rb") as file:
            for line in read_lines(file, block.offset, block.offset + block.size):
                if line.value is None or isinstance(line.value, dict):
                    continue
                record = decode_step(line.value, self.names)
                if record is None:
                    if block.offset < self.rolled_up:  # the others are counted
                        self.add_malformed(line.offset)
                elif block.first <= record.step < limit:
                    records.append(record)
        if not records:
            return None
        return summarize(
            records,
            offset=block.offset,
            size=block.size,
            dtype=self.dtype,
            last_scale=None if before is None else before.last_scale,
        )

    def add_malformed(self, offset: int) -> None:
        """Count a line that could not be read."""
        lines, first = self.malformed
        self.malformed = Malformed(lines + 1, min(first, offset) if lines else offset)


def _find_kept(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Return which blocks have steps that were not taken again.

    Each comes with the first step that the blocks after it replace.
    """
    limit, kept = 2**53, []
    for index in reversed(range(len(blocks))):
        if blocks[index].first < limit:
            kept.append((index, limit))
            limit = blocks[index].first
    return kept[::-1]


def _compare(block: Block, before: Block | None, follows: Block | None) -> Block:
    """Return a block whose first step is compared with the one that it follows.

    Args:
        block: A block of the run.
        before: The block that was written before it, with which it was compared.
        follows: The block before it, now that repeated steps are left out.
    """
    if before is follows:
        return block
    was, now = (_move(other, block) for other in (before, follows))
    return block._replace(
        growths=block.growths - (was > 0) + (now > 0),
        backoffs=block.backoffs - (was < 0) + (now < 0),
    )


def _move(before: Block | None, block: Block) -> float:
    """Return by how much the scale moved between two blocks."""
    return 0.0 if before is None else block.first_scale - before.last_scale


def _without_replaced_alarms(events: Sequence[Event]) -> list[Event]:
    """Return events without the alarms of steps that were taken again."""
    limit, kept = 2**53, []
    for event in reversed(events):
        after = _step_of(event.get("resumed"), "after_step")
        limit = limit if after is None else min(limit, after)
        step = _step_of(event.get("alarm"), "step")
        if step is None or step <= limit:
            kept.append(event)
    return kept[::-1]


def _step_of(value: Any, key: str) -> int | None:
    """Return the step that an event names; `None` if it names none."""
    step = value.get(key) if isinstance(value, dict) else None
    return step if type(step) is int else None


def rollup_path(path: str | os.PathLike[str]) -> Path:
    """Return where the roll-up of a run is: next to it."""
    return Path(f"{os.fspath(path)}.rollup")
