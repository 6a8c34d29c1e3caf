# SPDX-License-Identifier: Apache-2.0
"""Write the lines of a run and of its roll-up, in the order in which they come.

Lines are collected, and appended by `flush`: one append to the run, then one to the
roll-up, so that a roll-up never covers what the run does not have. Not safe to use from
several threads; `Recorder` is. Imports the standard library only.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lossscale.core.statistics import TensorStatistics
from lossscale.diagnostics.records.appending import AppendOnlyFile, cannot_be_written
from lossscale.diagnostics.records.blocks import (
    Block,
    BlockBuilder,
    TensorBlock,
    TensorRow,
)
from lossscale.diagnostics.records.layout import encode, encode_step
from lossscale.diagnostics.records.reader import scan_run, warn_of_malformed
from lossscale.diagnostics.records.rollup import ROLLUP_FORMAT, encode_block
from lossscale.diagnostics.records.run_file import RunFile, rollup_path
from lossscale.diagnostics.records.statistics_line import as_list, encode_statistics
from lossscale.diagnostics.records.steps import StepRecord


class RunWriter:
    """Writes a new run, or goes on with one."""

    def __init__(self, path: Path, header: dict[str, Any], *, overwrite: bool) -> None:
        """Open the file; go on with the run in it, if there is one.

        Raises:
            StateError: If the file holds something else than a run.
            SettingError: If it cannot be written.
        """
        self.path = path
        self._lines: list[str] = []
        self._rollup_lines: list[str] = []
        self._file = AppendOnlyFile(path)
        self._files = [self._file]
        try:
            # Overwriting is for runs as well, and not for any file of that name.
            found = scan_run(path) if self._file.size else None
            self._rollup = AppendOnlyFile(rollup_path(path))
            self._files.append(self._rollup)
            if found is None or overwrite:
                self._start(json.loads(encode(header)))
            else:
                self._resume(found)
        except OSError as error:
            self.remove()
            raise cannot_be_written(path, error) from None
        except BaseException:
            self.remove()
            raise

    def _start(self, header: dict[str, Any]) -> None:
        self._file.truncate()
        self._rollup.truncate()
        self.header = header
        self.last_step: int | None = None
        self.resumed = False
        self.names: list[str] = list(header["names"])
        self.positions = {name: index for index, name in enumerate(self.names)}
        line = encode(header) + "\n"
        self._lines.append(line)
        self._rollup_lines.append(_rollup_header(header))
        self._end = len(line)
        self._builder = BlockBuilder(dtype=header["dtype"], offset=self._end)

    def _resume(self, run: RunFile) -> None:
        """Go on after the last whole line of a run."""
        warn_of_malformed(run)
        self.header = run.header
        self.last_step = run.last_step
        self.resumed = True
        self.names = run.names
        self.positions = {}
        for index, name in enumerate(self.names):
            self.positions.setdefault(name, index)
        self._end = self._file.size
        block = run.blocks[-1] if run.blocks else None
        offset = run.start if block is None else block.offset + block.size
        self._builder = BlockBuilder(
            dtype=run.dtype,
            offset=offset,
            last_scale=None if block is None else block.last_scale,
        )
        self._builder.add_line(self._end - offset)
        if _last_byte(run.path) != b"\n":
            self._add_line("")  # ends a line that a kill has torn
        self._write_missing_rollup(run)

    def _write_missing_rollup(self, run: RunFile) -> None:
        if run.rolled_up == run.start or _last_byte(rollup_path(run.path)) != b"\n":
            # Nothing of it could be used, or its end is torn: write all of it again.
            self._rollup.truncate()
            self._rollup_lines.append(_rollup_header(run.header))
            new = run.names[len(run.header_names) :]
            events = [{"names": new}] if new else []
            events += run.events
            self._rollup_lines += [_rolled_up(run.start, event) for event in events]
            self._add_to_rollup(_in_order(run.blocks, run.tensor_blocks))
        else:
            self._add_to_rollup(run.finished)

    def add_step(self, record: StepRecord) -> None:
        """Add a step; its tensors must have been added before."""
        text = encode_step(record, self.positions)
        self._lines.append(f"{text}\n")
        self._end += len(text) + 1  # every line is ASCII
        self.last_step = record.step
        self._builder.add_step(record, len(text) + 1)
        self._add_to_rollup(self._builder.take())

    def add_statistics(
        self, statistics: TensorStatistics, *, step: int, scale: float
    ) -> None:
        """Add the statistics of a step."""
        self.add_names(statistics.names)
        if statistics.updates is not None:
            self.add_names(statistics.updates.names)
        text = encode_statistics(statistics, self.positions, step=step, scale=scale)
        self._lines.append(f"{text}\n")
        self._end += len(text) + 1
        rows = _extremes(statistics, self.positions)
        self._builder.add_statistics(step, rows, len(text) + 1)

    def add_event(self, event: dict[str, Any], *, new_block: bool = False) -> None:
        """Add a line that is not a step.

        Args:
            event: An object of one key.
            new_block: Whether the steps that follow are not those that come next.
        """
        if new_block:
            self._builder.close()
            self._add_to_rollup(self._builder.take())
        self._rollup_lines.append(_rolled_up(self._end, event))
        self._add_line(encode(event))

    def add_names(self, names: Iterable[str]) -> None:
        """Add the names of tensors that are not known yet."""
        new = [name for name in names if name not in self.positions]
        if new:
            new = list(dict.fromkeys(new))
            for index, name in enumerate(new, start=len(self.names)):
                self.positions[name] = index
            self.names += new
            self.add_event({"names": new})

    def flush(self) -> None:
        """Append what was collected: to the run, then to the roll-up.

        Raises:
            OSError: If it cannot be written.
        """
        lines, self._lines = self._lines, []
        if lines:
            self._file.append("".join(lines).encode())
        lines, self._rollup_lines = self._rollup_lines, []
        if lines:
            self._rollup.append("".join(lines).encode())

    def close(self) -> None:
        """Finish the last block, flush, and close the files.

        Raises:
            OSError: If it cannot be written.
        """
        try:
            self._builder.close()
            self._add_to_rollup(self._builder.take())
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files as they are."""
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Close the files, and remove those that were made by this."""
        self.abandon()
        paths = self.path, rollup_path(self.path)
        for path, file in zip(paths, self._files, strict=False):
            if file.is_new:
                path.unlink(missing_ok=True)

    def _add_line(self, text: str) -> None:
        self._lines.append(f"{text}\n")
        self._end += len(text) + 1
        self._builder.add_line(len(text) + 1)

    def _add_to_rollup(self, blocks: Iterable[Block | TensorBlock]) -> None:
        for block in blocks:
            if isinstance(block, Block):
                row: Any = encode_block(block, self.positions)
            else:
                row = {"tensors": list(block)}
            self._rollup_lines.append(encode(row) + "\n")


def _rollup_header(header: dict[str, Any]) -> str:
    return encode({"format": ROLLUP_FORMAT, "run": header["run"]}) + "\n"


def _rolled_up(offset: int, event: dict[str, Any]) -> str:
    return encode({"event": [offset, event]}) + "\n"


def _in_order(
    blocks: list[Block], tensor_blocks: list[TensorBlock]
) -> list[Block | TensorBlock]:
    """Return blocks as they were finished: by where they end."""
    every: list[Block | TensorBlock] = [*blocks, *tensor_blocks]
    return sorted(every, key=lambda block: block.offset + block.size)


def _extremes(
    statistics: TensorStatistics, positions: dict[str, int]
) -> list[TensorRow]:
    columns = (statistics.amax, statistics.zeros, statistics.subnormals)
    rows = zip(statistics.names, *map(as_list, columns), strict=True)
    return [
        (positions[name], float(amax), float(zeros) + float(subnormals))
        for name, amax, zeros, subnormals in rows
    ]


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return b""
        file.seek(-1, os.SEEK_END)
        return file.read(1)
