# SPDX-License-Identifier: Apache-2.0
"""One process's part of a run: steps go in, lines come out, once a second.

Safe to use from several threads. A process that was forked from it, as data loaders do,
does nothing. Imports the standard library only.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

from lossscale.core.statistics import TensorStatistics
from lossscale.diagnostics.alarms import Alarm, AlarmMonitor
from lossscale.diagnostics.loggers.base import StepWriter
from lossscale.diagnostics.records.description import (
    describe_formats,
    merge_description,
)
from lossscale.diagnostics.records.run_file import RecordWarning
from lossscale.diagnostics.records.steps import (
    StepRecord,
    find_nearest_finite,
)
from lossscale.diagnostics.records.writer import RunWriter

_NOTED_STEPS = 2
"""A step is held back for its `note` until so many steps have come without one."""
_MOST_NOTES = 4_096
"""Notes that wait for a step; a report comes a few steps after its step at most."""


class Note(NamedTuple):
    """What the training knows of a step, and the scaler does not."""

    loss: float | None = None
    lr: float | None = None


class Session:
    """Takes steps, statistics and notes, and writes them."""

    def __init__(
        self,
        writer: RunWriter,
        *,
        ordered: bool,
        monitor: AlarmMonitor | None,
        writers: Sequence[StepWriter],
        flush_seconds: float,
    ) -> None:
        """Start to write.

        Args:
            writer: Where lines go.
            ordered: Whether the names of the run are in the model's order.
            monitor: Raises alarms.
            writers: Handed every step and alarm as well.
            flush_seconds: How often lines are written; 0 for at once.
        """
        self._writer = writer
        self._ordered = ordered
        self._monitor = monitor
        self._writers = list(writers)
        self._flush_seconds = flush_seconds
        self._started = float(writer.header["started"])
        self._resumed_after = writer.last_step if writer.resumed else None
        self._index_offset: int | None = None
        self._pending: StepRecord | None = None
        self._notes: dict[int, Note] = {}
        self._hold = _NOTED_STEPS
        self._failures: list[str] = []
        self._open = True
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do: it was closed, or this is another process."""
        return not self._open or os.getpid() != self._process

    def now(self) -> float:
        """Return the seconds since the run was started."""
        return time.time() - self._started

    def number_of(self, index: int) -> int:
        """Return the step of the run that a scaler counts as another.

        A scaler counts from 1 in every process. A run that was resumed goes on from its
        last step, unless the scaler's count does so already.
        """
        with self._lock:
            if self._index_offset is None:
                after = self._resumed_after or 0
                self._index_offset = after if index <= after else 0
            return index + self._index_offset

    def add(self, record: StepRecord, *, count: bool = False) -> list[Alarm]:
        """Take a step, and return the alarms that were raised.

        Args:
            record: The step.
            count: Whether it is the one after the last, whatever its number.
        """
        with self._lock:
            if count:
                record = record._replace(step=self.last_step + 1)
            alarms = self._finish_pending()
            if self._notes and record.step in self._notes:
                record = _with_note(record, self._notes.pop(record.step))
            if self._hold:
                self._hold -= 1
                self._pending = record
            else:
                alarms += self._emit(record)
            self._after_adding()
        self._warn()
        return alarms

    def describe(
        self,
        policy: dict[str, Any] | None,
        device: str | None,
        names: Sequence[str],
        dtypes: Mapping[str, str],
    ) -> None:
        """Take what the header leaves open.

        Args:
            policy: The settings of the policy.
            device: What the run is on.
            names: The tensors in the model's order, if that is known.
            dtypes: The format of each tensor's gradient.
        """
        writer = self._writer
        with self._lock:
            writer.add_names((*names, *dtypes))
            in_order = bool(names) and writer.names[: len(names)] == list(names)
            self._ordered = self._ordered or in_order
            known = writer.header
            described: dict[str, Any] = {}
            if policy is not None and known.get("policy") is None:
                described["policy"] = policy
            if device is not None and known.get("device") is None:
                described["device"] = device
            if dtypes and known.get("dtypes") is None:
                described["dtypes"] = describe_formats(
                    dtypes, writer.names, known["dtype"]
                )
            if in_order and not known["names"]:
                described["ordered"] = len(names)
            if described:
                merge_description(known, described, writer.names)
                writer.add_event({"described": described})
            if self._monitor is not None and not self._monitor.knows_policy:
                self._monitor.use_policy(policy)
            self._after_adding()
        self._warn()

    def add_statistics(
        self, statistics: TensorStatistics, *, step: int | None, scale: float
    ) -> None:
        """Take the statistics of a step; by default of the last one."""
        with self._lock:
            at = self.last_step if step is None else step
            self._writer.add_statistics(statistics, step=at, scale=scale)
            self._after_adding()
        self._warn()

    def add_note(self, step: int, note: Note) -> None:
        """Take a note for a step that is held back, or will come."""
        with self._lock:
            self._hold = _NOTED_STEPS
            if self._pending is not None and self._pending.step == step:
                self._pending = _with_note(self._pending, note)
                return
            self._notes[step] = note
            if len(self._notes) > _MOST_NOTES:
                del self._notes[next(iter(self._notes))]

    def flush(self) -> list[Alarm]:
        """Write everything; return the alarms that were raised."""
        with self._lock:
            alarms = [] if self.is_idle else self._finish_pending()
            self._flush()
        self._warn()
        return alarms

    def close(self) -> list[Alarm]:
        """Write everything, and close the files; return the alarms that were raised."""
        if self.is_idle:
            return []
        self._stop.set()
        with self._lock:
            alarms = self._finish_pending()
            self._open = False
            closed = {"step": self._writer.last_step, "time": round(self.now(), 3)}
            self._writer.add_event({"closed": closed})
            try:
                self._writer.close()
            except OSError as error:
                self._fail(error)
        self._tell_writers(methodcaller("close"))
        self._warn()
        return alarms

    @property
    def last_step(self) -> int:
        """The last step that was added, or that is in the file; 0 if there is none."""
        if self._pending is not None:
            return self._pending.step
        return self._writer.last_step or 0

    def _finish_pending(self) -> list[Alarm]:
        record, self._pending = self._pending, None
        return [] if record is None else self._emit(record)

    def _emit(self, record: StepRecord) -> list[Alarm]:
        """Write a step, and whatever belongs to it."""
        writer = self._writer
        if writer.last_step is not None and record.step <= writer.last_step:
            again = {"after_step": record.step - 1, "time": round(record.time, 3)}
            writer.add_event({"resumed": again}, new_block=True)
        if record.nonfinite:
            writer.add_names(name for name, _ in record.nonfinite)
            if self._ordered:
                nearest = find_nearest_finite(
                    record.nonfinite, writer.names, writer.positions
                )
                record = record._replace(nearest_finite=nearest)
        writer.add_step(record)
        self._tell_writers(methodcaller("write_step", record))
        return [] if self._monitor is None else self._raise_alarms(record)

    def _raise_alarms(self, record: StepRecord) -> list[Alarm]:
        assert self._monitor is not None  # noqa: S101  # for mypy
        alarms = self._monitor.update(record)
        for alarm in alarms:
            self._writer.add_event({"alarm": alarm._asdict()})
            self._tell_writers(methodcaller("write_alarm", alarm))
        return alarms

    def _tell_writers(self, call: Callable[[StepWriter], object]) -> None:
        """Call every writer; one that fails is not called again."""
        for each in tuple(self._writers):
            failure = _try(call, each)
            if failure is not None:
                self._writers.remove(each)
                self._failures.append(failure)

    def _after_adding(self) -> None:
        """Write now, or see to it that it happens."""
        if self._flush_seconds == 0:
            self._flush()
        elif self._thread is None:
            self._thread = threading.Thread(
                target=self._flush_now_and_then, name="lossscale-recorder", daemon=True
            )
            self._thread.start()

    def _flush_now_and_then(self) -> None:
        while not self._stop.wait(self._flush_seconds):
            with self._lock:
                if self._open:
                    self._flush()

    def _flush(self) -> None:
        if self.is_idle:
            return
        try:
            self._writer.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Stop to record; the warning is left to the thread that records."""
        self._open = False
        self._writer.abandon()
        reason = error.strerror or error
        self._failures.append(
            f"{self._writer.path} cannot be written: {reason}. Recording ends here, "
            "and the training goes on."
        )

    def _warn(self) -> None:
        failures, self._failures = self._failures, []
        for failure in failures:
            warnings.warn(failure, RecordWarning, stacklevel=4)


def _try(call: Callable[[StepWriter], object], writer: StepWriter) -> str | None:
    """Call a writer, and return what to say if it fails."""
    try:
        call(writer)
    except Exception as error:  # noqa: BLE001  # a tracker may raise anything
        return (
            f"{type(writer).__name__} failed: {type(error).__name__}: {error}. It is "
            "not called again, and recording goes on."
        )
    return None


def _with_note(record: StepRecord, note: Note) -> StepRecord:
    known = {name: value for name, value in note._asdict().items() if value is not None}
    return record._replace(**known)
