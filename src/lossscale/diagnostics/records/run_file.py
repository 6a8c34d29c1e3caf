# SPDX-License-Identifier: Apache-2.0
"""`RunFile`: what is known of a recorded run; its single steps stay on the disk.

Imports the standard library only.
"""

import os
from collections.abc import Iterator
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
        """The lines that are not steps: resumed, alarm, closed."""
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
        """Leave out steps that the run took again after it was resumed."""
        limit, kept = 2**53, []
        for block in reversed(self.blocks):
            if block.first < limit:
                kept.append(block if block.last < limit else self._cut(block, limit))
                limit = block.first
        self.blocks = kept[::-1]

    def _cut(self, block: Block, limit: int) -> Block:
        """Return a block without its steps from a limit on."""
        with self.path.open("rb") as file:
            records = [r for r in self._records_of(file, block) if r.step < limit]
        return summarize(
            records,
            offset=block.offset,
            size=block.size,
            dtype=self.dtype,
            last_scale=None,
        )


def rollup_path(path: str | os.PathLike[str]) -> Path:
    """Return where the roll-up of a run is: next to it."""
    return Path(f"{os.fspath(path)}.rollup")
