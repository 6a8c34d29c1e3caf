# SPDX-License-Identifier: Apache-2.0
"""Record every step of a training: one line of JSON each, and a roll-up next to it.

A `Recorder` does not stop a training: what is wrong with its arguments is an error when
it is made, and a disk that is full later is one warning. It writes once a second, each
time by a single append, so that a kill tears at most one line. Imports the standard
library only, so that it runs wherever the training does.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from lossscale.core import validation
from lossscale.core.state import ScaleState, Signal
from lossscale.core.statistics import TensorStatistics
from lossscale.diagnostics.alarms import Alarm, AlarmMonitor, AlarmRules
from lossscale.diagnostics.loggers.base import StepWriter
from lossscale.diagnostics.loggers.python_logging import LoggingWriter
from lossscale.diagnostics.records.appending import cannot_be_written
from lossscale.diagnostics.records.headers import (
    check_names,
    find_versions,
    make_header,
)
from lossscale.diagnostics.records.layout import describe_policy
from lossscale.diagnostics.records.session import Note, Session
from lossscale.diagnostics.records.statistics_line import as_list
from lossscale.diagnostics.records.steps import (
    CAUSES,
    StepRecord,
    read_report,
)
from lossscale.diagnostics.records.values import (
    Tensors,
    cause_of,
    check_alarms,
    check_applied,
    check_number,
    check_on_alarm,
    check_rank,
    check_scale,
    check_statistics,
    check_step,
    check_tensors,
    check_writers,
    not_a_signal,
)
from lossscale.diagnostics.records.writer import RunWriter
from lossscale.errors import SettingError

OnAlarm: TypeAlias = Callable[[Alarm], object]
"""Called with every alarm."""

_DEFAULT_RULES = AlarmRules()


class Recorder:
    """Writes what every step did to a file, for `lossscale report` and `watch`.

    Call it with a step report (`GradScaler(..., on_step=Recorder("run.jsonl"))`), or
    call `record` or `record_signal` after each step.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale.diagnostics import Recorder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path) as recorder:
        ...         recorder.record(scale=65536.0, applied=True, loss=2.3, norm=0.5)
        ...     len(path.read_text().splitlines())
        3
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        policy: Any = None,
        dtype: str = "float16",
        names: Iterable[str] | Mapping[str, str] = (),
        device: str | None = None,
        config: Mapping[str, Any] | None = None,
        statistics_every: int = 50,
        flush_seconds: float = 1.0,
        if_exists: str = "resume",
        rank: int | None = None,
        every_rank: bool = False,
        alarms: AlarmRules | None = _DEFAULT_RULES,
        on_alarm: OnAlarm | None = None,
        writers: Sequence[StepWriter] | None = None,
    ) -> None:
        """Open the file.

        Args:
            path: Where the run goes; folders that are missing are made. The roll-up is
                next to it, with `.rollup` at its end.
            name: What reports call the run; by default the file's name.
            policy: The policy of the scale. Alarms read its growth interval and floor.
                This and `names` and `device` are needed where `record` is called; a
                `GradScaler` and the callbacks of trainers describe themselves.
            dtype: The format in which gradients are computed, for the headroom.
            names: Every tensor, in the model's order, or a mapping from each to its
                dtype. With them a record names the layer that broke.
            device: What the run is on; by default the processor.
            config: Anything else to keep with the run, such as hyperparameters.
            statistics_every: How often a framework's hook measures every tensor, in
                steps; 0 for never.
            flush_seconds: How often the file is written; 0 for after every step.
            if_exists: What to do if the file holds a run: "resume" it, "overwrite" it,
                or "raise".
            rank: Which process of several this is; by default the environment's RANK,
                or 0.
            every_rank: Record every rank, each to a file of its own, such as
                `run.rank3.jsonl`. Otherwise rank 0 is recorded, and the others do
                nothing.
            alarms: When alarms are raised; `None` for never.
            on_alarm: Called with every `Alarm`, in the thread that records the step.
            writers: Handed every step and alarm as well; by default Python's logging.

        Raises:
            SettingError: If a setting is invalid, or the file cannot be written.
            SettingTypeError: If a setting is of the wrong type.
            StateError: If the file holds something else than a run.
        """
        rank = check_rank(rank)
        separate = validation.check_bool("every_rank", every_rank)
        seconds = validation.check_number(
            "flush_seconds", flush_seconds, "0 or more seconds"
        )
        if seconds < 0:
            message = f"flush_seconds must be 0 or more, got {seconds!r}."
            raise SettingError(message)
        validation.check_choice(
            "if_exists", if_exists, ("resume", "overwrite", "raise")
        )
        self.statistics_every = check_step(statistics_every, "statistics_every")
        """Hooks measure every tensor once in so many steps; 0 for never."""
        self.path = _rank_path(Path(path), rank) if separate else Path(path)
        """Where the run goes."""
        self._on_alarm = on_alarm
        check_alarms(alarms)
        check_on_alarm(on_alarm)
        each = (LoggingWriter(),) if writers is None else check_writers(writers)
        header = make_header(
            name=name,
            policy=policy,
            dtype=dtype,
            names=names,
            device=device,
            config=config,
            rank=rank,
            statistics_every=self.statistics_every,
        )
        monitor = None
        if alarms is not None:
            monitor = AlarmMonitor(alarms, policy=header["policy"], dtype=dtype)
        self._session: Session | None = None
        if rank > 0 and not separate:
            return
        writer = _open(self.path, header, if_exists)
        try:
            self._session = Session(
                writer,
                ordered=bool(header["names"]),
                monitor=monitor,
                writers=each,
                flush_seconds=seconds,
            )
        except BaseException:
            writer.remove()
            raise
        # Also at exit: what was recorded in the last second is not lost.
        weakref.finalize(self, self._session.close)

    @property
    def last_step(self) -> int:
        """The last step of the run, that of a resumed file included; 0 if none."""
        return 0 if self._session is None else self._session.last_step

    def describe(
        self,
        *,
        policy: Any = None,
        device: str | None = None,
        names: Iterable[str] = (),
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """Add what a framework knows of the run; what was given before stays.

        `lossscale.torch.GradScaler` and the callbacks of trainers call it once.

        Args:
            policy: The policy of the scale.
            device: What the run is on.
            names: Every tensor in the model's order, if that is known.
            dtypes: The format in which each tensor's gradient is stored, by its name.
        """
        session = self._session
        if session is not None and not session.is_idle:
            session.describe(
                describe_policy(policy), device, check_names(names), dtypes or {}
            )

    def __call__(self, report: Any) -> None:
        """Record a step report, as `on_step` is given them.

        Args:
            report: A framework's step report. Its index counts from 1 in every process;
                after a resume, the run goes on from its last step.
        """
        session = self._session
        if session is None or session.is_idle:
            return
        record = read_report(report)
        step = session.number_of(record.step)
        statistics = getattr(report, "statistics", None)
        if record.amax is None and statistics is not None:
            record = record._replace(amax=_largest(statistics) / record.scale)
        self._announce(session.add(record._replace(step=step, time=session.now())))
        if statistics is not None:
            session.add_statistics(statistics, step=step, scale=record.scale)

    def record(
        self,
        *,
        scale: Any,
        applied: Any,
        step: int | None = None,
        cause: str | None = None,
        norm: Any = None,
        clip: Any = None,
        amax: Any = None,
        loss: Any = None,
        lr: Any = None,
        nonfinite: Tensors = (),
    ) -> None:
        """Record a step from plain numbers, or from arrays of one number.

        An array on a device is waited for; pass what the host has already.

        Args:
            scale: The scale that the step's gradients carried.
            applied: Whether the step was applied.
            step: Which step it is; by default one after the last. A step that is not
                after the last one replaces what was recorded from there on.
            cause: Why it was skipped: "inf" (the default), "nan", "headroom", "loss" or
                "not stepped".
            norm: The norm of the unscaled gradients.
            clip: The factor that clipping multiplied them by.
            amax: Their largest finite magnitude, unscaled.
            loss: The unscaled loss.
            lr: The learning rate.
            nonfinite: The tensors that were not finite, each with "inf" or "nan".

        Raises:
            SettingError: If a value is invalid; nothing is recorded then.
            SettingTypeError: If a value is of the wrong type; likewise.
        """
        session = self._session
        if session is None or session.is_idle:
            return
        was_applied = check_applied(applied)
        record = StepRecord(
            0 if step is None else check_step(step),
            session.now(),
            check_scale(scale),
            was_applied,
            check_number("norm", norm),
            check_number("clip", clip),
            check_number("amax", amax),
            check_number("loss", loss),
            check_number("lr", lr),
        )
        if not was_applied:
            record = record._replace(
                cause=validation.check_choice("cause", cause or "inf", CAUSES),
                nonfinite=check_tensors(nonfinite),
            )
        self._announce(session.add(record, count=step is None))

    def record_signal(
        self,
        state: ScaleState,
        signal: Signal,
        *,
        step: int | None = None,
        loss: Any = None,
        lr: Any = None,
        clip: Any = None,
        nonfinite: Tensors = (),
    ) -> None:
        """Record a step from what `unscale` returned, in any framework.

        Args:
            state: The state that the step used: that before `update`.
            signal: What `unscale` returned.
            step: Which step it is; by default one after the last.
            loss: The unscaled loss.
            lr: The learning rate.
            clip: The factor that clipping multiplied the gradients by.
            nonfinite: The tensors that were not finite, each with "inf" or "nan".

        Raises:
            SettingTypeError: If these are not a state and a signal, in this order.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import numpy as np
            >>> import lossscale.numpy as ls
            >>> from lossscale import Dynamic
            >>> from lossscale.diagnostics import Recorder, read_run
            >>> state = ls.init(Dynamic())
            >>> _, signal = ls.unscale(np.float16("inf"), state, measure=["nan"])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = Path(folder) / "run.jsonl"
            ...     with Recorder(path) as recorder:
            ...         recorder.record_signal(state, signal)
            ...     next(read_run(path).records()).cause
            'inf'
        """
        if self._session is None or self._session.is_idle:
            return
        try:
            scale = check_scale(state.scale)
            amax = check_number("amax", signal.amax)
        except AttributeError:
            raise not_a_signal(state, signal) from None
        self.record(
            scale=scale,
            applied=check_applied(signal.finite, "signal.finite"),
            step=step,
            cause=cause_of(signal),
            norm=signal.norm,
            clip=clip,
            amax=None if amax is None else amax / scale,
            loss=loss,
            lr=lr,
            nonfinite=nonfinite,
        )

    def wants_statistics(self, step: int) -> bool:
        """Whether a step is one whose tensors are to be measured.

        Args:
            step: Counted from 1; the first one is.
        """
        every = self.statistics_every
        return self._session is not None and every > 0 and (step - 1) % every == 0

    def record_statistics(
        self, statistics: TensorStatistics, *, scale: Any, step: int | None = None
    ) -> None:
        """Record what the stored gradients of a step look like, tensor by tensor.

        Args:
            statistics: What `measure_tensors` returns, or what a kernel has measured;
                its `updates`, if it has them, are recorded too.
            scale: The scale that the gradients carried.
            step: Which step it is; by default the last that was recorded.

        Raises:
            SettingTypeError: If these are no statistics of tensors.
        """
        if self._session is not None and not self._session.is_idle:
            at = None if step is None else check_step(step)
            value = check_scale(scale)
            check_statistics(statistics)
            self._session.add_statistics(statistics, step=at, scale=value)

    def note(self, step: int, *, loss: Any = None, lr: Any = None) -> None:
        """Add the loss or the learning rate to a step that a scaler reports.

        Call it for a step before the next one is reported.

        Args:
            step: The step as its report counts it: `scaler.last_step.index`.
            loss: The unscaled loss, as a number that the host has.
            lr: The learning rate.
        """
        session = self._session
        if session is not None and not session.is_idle:
            note = Note(check_number("loss", loss), check_number("lr", lr))
            session.add_note(session.number_of(check_step(step)), note)

    def flush(self) -> None:
        """Write what was recorded now instead of within a second."""
        if self._session is not None:
            self._announce(self._session.flush())

    def close(self) -> None:
        """Write everything, note in the file that the run has ended, and close it."""
        if self._session is not None:
            self._announce(self._session.close())

    def __enter__(self) -> "Recorder":  # noqa: PYI034  # Self needs Python 3.11
        """Return the recorder."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def _announce(self, alarms: Sequence[Alarm]) -> None:
        if self._on_alarm is not None:
            for alarm in alarms:
                self._on_alarm(alarm)


def _open(path: Path, header: dict[str, Any], if_exists: str) -> RunWriter:
    """Return the writer of a new run, or of one that is resumed."""
    if if_exists == "raise" and path.exists():
        message = (
            f"{path} exists, and if_exists is 'raise'. Give another path, or pass "
            "if_exists='resume' to go on with the run."
        )
        raise SettingError(message)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{path.parent} cannot be made: {error.strerror or error}."
        raise SettingError(message) from None
    writer = RunWriter(path, header, overwrite=if_exists == "overwrite")
    try:
        _begin(writer, header)
    except OSError as error:
        writer.remove()
        raise cannot_be_written(path, error) from None
    except BaseException:
        writer.remove()
        raise
    return writer


def _begin(writer: RunWriter, header: dict[str, Any]) -> None:
    """Write the header, or that the run goes on."""
    if writer.resumed:
        writer.add_names(header["names"])
        resumed = {
            "after_step": writer.last_step,
            "time": round(time.time() - writer.header["started"], 3),
            "policy": header["policy"],
            "versions": find_versions(),
        }
        writer.add_event({"resumed": resumed}, new_block=True)
    writer.flush()


def _largest(statistics: TensorStatistics) -> float:
    """Return the largest finite magnitude of all tensors, as stored."""
    return max((float(amax) for amax in as_list(statistics.amax)), default=0.0)


def _rank_path(path: Path, rank: int) -> Path:
    """Return the file of one rank: run.jsonl becomes run.rank3.jsonl."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
