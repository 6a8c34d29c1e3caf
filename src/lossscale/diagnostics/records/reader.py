# SPDX-License-Identifier: Apache-2.0
"""Read a recorded run: its header, its blocks, and its steps where they are asked for.

`read_run` takes what it can from the roll-up next to the run, and computes the rest
from the run itself: the end that was not rolled up yet, or all of it if the roll-up is
missing, torn or of another run. Imports the standard library only.
"""

import json
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lossscale.diagnostics.records.blocks import (
    Block,
    BlockBuilder,
)
from lossscale.diagnostics.records.description import merge_description
from lossscale.diagnostics.records.layout import (
    MOST_BYTES,
    Event,
    check_header,
    decode_step,
    is_name_list,
    not_a_run,
)
from lossscale.diagnostics.records.lines import Line, read_lines
from lossscale.diagnostics.records.rollup import (
    ROLLUP_FORMAT,
    decode_block,
    decode_tensor_block,
    read_extremes,
)
from lossscale.diagnostics.records.run_file import (
    RecordWarning,
    RunFile,
    rollup_path,
)
from lossscale.errors import StateError

OnProgress = Callable[[int, int], object]
"""Called with how many bytes were read, and how many there are."""


def read_run(
    path: str | os.PathLike[str], *, on_progress: OnProgress | None = None
) -> RunFile:
    """Read a run that a `Recorder` wrote, or is still writing.

    Lines that cannot be read, such as one torn by a kill, are left out with one
    `RecordWarning`. Reading a run whose roll-up is missing takes about as long as a
    minute for five million steps; with it, a second.

    Args:
        path: The run's file.
        on_progress: Called now and then while steps are read one by one.

    Raises:
        StateError: If it is not a recorded run, or cannot be read.
    """
    run = scan_run(path, on_progress=on_progress)
    run.replace_repeated()
    warn_of_malformed(run)
    return run


def warn_of_malformed(run: RunFile) -> None:
    """Warn once, if lines could not be read."""
    count, offset = run.malformed
    if count:
        lines = "1 line" if count == 1 else f"{count:,} lines"
        message = (
            f"{run.path}: {lines} could not be read, the first at byte {offset:,}. A "
            "run that is killed while it writes leaves one torn line."
        )
        warnings.warn(message, RecordWarning, stacklevel=3)


def scan_run(
    path: str | os.PathLike[str], *, on_progress: OnProgress | None = None
) -> RunFile:
    """Read a run, and keep what is wrong with it instead of warning."""
    with open_regular(path) as file:
        run = _read_header(Path(path), file)
        end = os.fstat(file.fileno()).st_size
        _read_rollup(run, file, end)
        _read_rest(run, file, end, on_progress)
    for described in run.events_of("described"):
        merge_description(run.header, described, run.names)
    return run


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading; a directory, pipe or device is an error.

    Raises:
        StateError: If it cannot be read, saying why.
    """
    kind = None
    try:
        mode = Path(path).stat().st_mode  # first: to open a pipe waits for a writer
        if stat.S_ISREG(mode):
            return Path(path).open("rb")
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}."
    except ValueError as error:  # a null byte
        message = f"{os.fspath(path)!r} cannot be read: {error}."
    if kind is not None:
        message = f"{path} is {kind}; expected a run recorded as JSON lines."
    raise StateError(message)


def _read_header(path: Path, file: BinaryIO) -> RunFile:
    first = file.read(1)
    if not first:
        message = f"{path} is empty: no run was recorded in it."
        raise StateError(message)
    file.seek(0)
    # One byte decides about most foreign files, however long their first line is.
    line = file.readline(MOST_BYTES) if first == b"{" else b""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        raise StateError(not_a_run(str(path))) from None
    return RunFile(path, check_header(header, str(path)), len(line))


def _read_rollup(run: RunFile, file: BinaryIO, end: int) -> None:
    """Take blocks and events from the roll-up, as far as they are those of the run."""
    try:
        rollup = open_regular(rollup_path(run.path))
    except StateError:
        return
    with rollup:
        size = os.fstat(rollup.fileno()).st_size
        lines = read_lines(rollup, 0, size)
        head = next(lines, Line(0, 0, None)).value
        if head != {"format": ROLLUP_FORMAT, "run": run.header["run"]}:
            return
        events: list[tuple[int, Event]] = []
        for line in lines:
            if not _take_rolled_up(run, line.value, events, end):
                break
    _check_end(run, file)
    run.events = [event for offset, event in events if offset < run.end]
    run.tensor_blocks = [
        block for block in run.tensor_blocks if block.offset + block.size <= run.end
    ]
    run.names = list(run.header_names)
    for event in run.events:
        run.names += event.get("names", ())
    run.events = [event for event in run.events if "names" not in event]
    run.rolled_up = run.end


def _take_rolled_up(
    run: RunFile, value: Any, events: list[tuple[int, Event]], end: int
) -> bool:
    """Take one row of a roll-up; False if it does not go on from the row before."""
    if isinstance(value, list):
        block = decode_block(value, run.names)
        if block is None or block.offset != run.end or block.offset + block.size > end:
            return False
        run.blocks.append(block)
        run.end += block.size
        return True
    if not isinstance(value, dict):
        return False
    if "tensors" in value:
        tensors = decode_tensor_block(value["tensors"])
        if tensors is not None:
            run.tensor_blocks.append(tensors)
        return tensors is not None
    return _take_rolled_up_event(run, value.get("event"), events)


def _take_rolled_up_event(
    run: RunFile, value: Any, events: list[tuple[int, Event]]
) -> bool:
    pair = value if isinstance(value, list) and len(value) == len(("at", "it")) else ()
    if not pair or type(pair[0]) is not int or not _is_event(pair[1]):
        return False
    events.append((pair[0], pair[1]))
    run.names += pair[1].get("names", ())
    return True


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    return is_name_list(value["names"]) if "names" in value else True


def _check_end(run: RunFile, file: BinaryIO) -> None:
    """Drop the blocks unless the last of them is where the roll-up says."""
    if not run.blocks:
        return
    block = run.blocks[-1]
    lines = list(read_lines(file, block.offset, block.offset + block.size))
    steps = [line.value for line in lines if isinstance(line.value, list)]
    found = [step[0] for step in steps if step]
    # A torn line may be among them, and is not counted.
    if not found or (found[0], found[-1]) != (block.first, block.last):
        run.blocks, run.tensor_blocks, run.end = [], [], run.start


class _Rest:
    """Reads the lines of a run that are not rolled up."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self._last = run.last_step
        last_scale = run.blocks[-1].last_scale if run.blocks else None
        self._builder = BlockBuilder(
            dtype=run.dtype, offset=run.end, last_scale=last_scale
        )
        self._positions = {name: index for index, name in enumerate(run.names)}

    def take(self, line: Line) -> None:
        """Take one line."""
        if isinstance(line.value, list):
            self._take_step(line)
        elif isinstance(line.value, dict):
            self._take_event(line)
        else:
            self._builder.add_line(line.size)
            if line.value is not None:
                self._skip(line)
        self._run.end += line.size

    def finish(self) -> None:
        """Finish the last block."""
        self._builder.close()
        self._keep()

    def _take_step(self, line: Line) -> None:
        record = decode_step(line.value, self._run.names)
        if record is None:
            self._builder.add_line(line.size)
            self._skip(line)
            return
        if self._last is not None and record.step <= self._last:
            self._builder.close()  # it was resumed from an earlier step
        self._last = record.step
        self._builder.add_step(record, line.size)
        self._keep()

    def _take_event(self, line: Line) -> None:
        event = line.value
        if "statistics" in event:
            found = read_extremes(event["statistics"], self._run.names, self._positions)
            if found is None:
                self._skip(line)
                self._builder.add_line(line.size)
            else:
                self._builder.add_statistics(*found, line.size)
            return
        if not _is_event(event):
            self._skip(line)
        elif "names" in event:
            self._run.names += event["names"]
            for index, name in enumerate(self._run.names):
                self._positions.setdefault(name, index)
        else:
            self._run.events.append(event)
            if "resumed" in event:
                self._builder.close()
        self._builder.add_line(line.size)

    def _skip(self, line: Line) -> None:
        self._run.add_malformed(line.offset)

    def _keep(self) -> None:
        for block in self._builder.take():
            self._run.finished.append(block)
            if isinstance(block, Block):
                self._run.blocks.append(block)
            else:
                self._run.tensor_blocks.append(block)


def _read_rest(
    run: RunFile, file: BinaryIO, end: int, on_progress: OnProgress | None
) -> None:
    """Read what is not rolled up, line by line."""
    rest, start, reported = _Rest(run), run.end, run.end
    for line in read_lines(file, run.end, end):
        rest.take(line)
        if on_progress is not None and run.end - reported > _REPORTED_BYTES:
            on_progress(run.end - start, end - start)
            reported = run.end
    rest.finish()


_REPORTED_BYTES = 2**22
