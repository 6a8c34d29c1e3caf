# SPDX-License-Identifier: Apache-2.0
"""Follow a run that is being recorded: what was appended since the last time.

Imports the standard library only.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lossscale.diagnostics.records.appending import is_being_written
from lossscale.diagnostics.records.description import merge_description
from lossscale.diagnostics.records.layout import decode_step, is_name_list
from lossscale.diagnostics.records.lines import read_lines
from lossscale.diagnostics.records.reader import open_regular, read_run
from lossscale.errors import StateError

if TYPE_CHECKING:
    from lossscale.diagnostics.records.steps import StepRecord

MOST_RECENT = 4_096
"""How many steps are kept."""

_MOST_ALARMS = 100


class RunFollower:
    """The last steps of a run, and totals of all of them.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale.diagnostics import Recorder
        >>> from lossscale.diagnostics.records.follower import RunFollower
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path, flush_seconds=0) as recorder:
        ...         follower = RunFollower(path)
        ...         recorder.record(scale=8.0, applied=False)
        ...         recorder.flush()
        ...         follower.update()
        ...         follower.skipped
        1
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read what there is.

        Raises:
            StateError: If it is not a recorded run, or cannot be read.
        """
        self.path = Path(path)
        with _one_error(self.path):
            self._start()

    def _start(self) -> None:
        # First: a file that takes its place meanwhile is seen by the next update.
        with open_regular(self.path) as file:
            identity = _identify(file)
        self._read()
        self._identity = identity

    def _read(self) -> None:
        run = read_run(self.path)
        self.header: dict[str, Any] = run.header
        """The first line of the run, and what was described later."""
        self.title = run.title
        """What to call the run."""
        self.steps = run.rows
        """How many steps there are."""
        self.causes = Counter[str]()
        """How many of them were skipped, by cause."""
        for block in run.blocks:
            self.causes.update(block.causes)
        last = run.last_step or 0
        recent = run.records(max(0, last - MOST_RECENT))
        self.recent = deque(recent, maxlen=MOST_RECENT)
        """The last steps."""
        skipped = [record for record in self.recent if record.skipped]
        self.last_skip: StepRecord | None = skipped[-1] if skipped else None
        """The last skipped step, as far as it is known."""
        self.alarms: deque[dict[str, Any]] = deque(maxlen=_MOST_ALARMS)
        """The last alarms, as the file has them."""
        self.ended = False
        """Whether the run was closed."""
        self._last = run.last_step
        self._names = list(run.names)
        self._end = run.end
        for event in run.events:
            self._take_event(event)

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return sum(self.causes.values())

    @property
    def is_live(self) -> bool:
        """Whether a process is writing the run; False where that cannot be known."""
        return is_being_written(self.path)

    @property
    def seconds_since_written(self) -> float | None:
        """How long ago the run was written last; `None` if its file is gone."""
        try:
            return max(0.0, time.time() - self.path.stat().st_mtime)
        except OSError:
            return None

    def update(self) -> None:
        """Read what was appended; a run that was overwritten is read from its start.

        Raises:
            StateError: If it cannot be read any more.
        """
        with _one_error(self.path), open_regular(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._end or _identify(file) != self._identity:
                self._start()
                return
            for line in read_lines(file, self._end, size):
                whole = self._end + line.size
                file.seek(whole - 1)
                if file.read(1) != b"\n":
                    break  # it is still being written
                self._end = whole
                if isinstance(line.value, list):
                    if not self._take_step(line.value):
                        self._start()
                        return
                elif isinstance(line.value, dict):
                    self._take_event(line.value)

    def _take_step(self, row: list[Any]) -> bool:
        """Take a step; False if it replaces steps that were counted already."""
        record = decode_step(row, self._names)
        if record is None:
            return True
        if self._last is not None and record.step <= self._last:
            return False
        self._last = record.step
        self.ended = False
        self.steps += 1
        self.recent.append(record)
        if record.skipped:
            self.causes[record.cause or "inf"] += 1
            self.last_skip = record
        return True

    def _take_event(self, event: dict[str, Any]) -> None:
        if is_name_list(event.get("names")):
            self._names += event["names"]
        elif isinstance(event.get("alarm"), dict):
            self.alarms.append(event["alarm"])
        elif "described" in event:
            merge_description(self.header, event["described"], self._names)
        elif "closed" in event or "resumed" in event:
            self.ended = "closed" in event


def _identify(file: BinaryIO) -> tuple[int, int, bytes]:
    """Return what tells a run from one that is put into its place, or written over it.

    The number of the run comes first in its header.
    """
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, file.read(_HEAD_BYTES)


_HEAD_BYTES = 256


@contextmanager
def _one_error(path: Path) -> Iterator[None]:
    """Raise a `StateError` where a file cannot be read any more, or is removed."""
    try:
        yield
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}."
        raise StateError(message) from None
