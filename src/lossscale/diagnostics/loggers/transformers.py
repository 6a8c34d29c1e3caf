# SPDX-License-Identifier: Apache-2.0
"""A callback for the Trainer of transformers that records a run."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from lossscale.diagnostics.loggers.base import StepWriter
from lossscale.diagnostics.loggers.packages import import_package
from lossscale.diagnostics.loggers.reports import ReportFollower
from lossscale.diagnostics.records.recorder import Recorder
from lossscale.errors import SettingTypeError

_Callback: Any = import_package("transformers", "TransformersCallback").TrainerCallback


class TransformersCallback(_Callback):  # type: ignore[misc]  # transformers is read as Any
    """Records every step of a `Trainer` whose scaler is `lossscale.torch.GradScaler`.

    The loss and the learning rate are those that the Trainer logs, at the steps at
    which it logs them. After one that was not finite the Trainer's own sum is not
    finite either, so that the losses after it are not known. Nothing is waited for.
    """

    def __init__(
        self, recorder: Recorder | None = None, writers: Sequence[StepWriter] = ()
    ) -> None:
        """Choose what is written.

        Args:
            recorder: Records the run, if it is given. It is flushed when the training
                ends, and closed by you.
            writers: Handed every step as well, such as a `WandbWriter`.
        """
        super().__init__()
        self._recorder = recorder
        self._writers = tuple(writers)
        self._follower: ReportFollower | None = None
        self._index: int | None = None
        self._loss_is_lost = False
        """Whether the Trainer's sum of losses is no longer finite."""

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        optimizer: Any = None,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Find the scaler."""
        del args, state, control
        self._follower = None
        self._loss_is_lost = False
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            self._follow(scaler, model)

    def on_optimizer_step(
        self,
        args: Any,
        state: Any,
        control: Any,
        optimizer: Any = None,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Take the step."""
        del args, state, control
        if self._follower is None:
            self._follow(getattr(optimizer, "scaler", None), model)
        if self._follower is not None:
            self._index = self._follower.poll() or self._index

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add what the Trainer has logged to the step."""
        del args, state, control
        entries = logs or {}
        if self._recorder is not None and self._index is not None and "loss" in entries:
            loss = None if self._loss_is_lost else float(entries["loss"])
            self._loss_is_lost |= loss is not None and not isfinite(loss)
            rate = entries.get("learning_rate")
            self._recorder.note(self._index, loss=loss, lr=rate)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write what is left."""
        del args, state, control
        if self._follower is not None:
            self._follower.finish()
        for writer in self._writers:
            writer.flush()
        if self._recorder is not None:
            self._recorder.flush()

    def _follow(self, scaler: Any, model: Any) -> None:
        if not hasattr(scaler, "last_step"):
            message = (
                "TransformersCallback reads lossscale.torch.GradScaler; the Trainer "
                f"has {type(scaler).__name__}. Train with fp16=True, and set "
                "trainer.accelerator.scaler = GradScaler(...) before train()."
            )
            raise SettingTypeError(message)
        self._follower = ReportFollower(scaler, self._deliver)
        if self._recorder is not None:
            scaler.attach(self._recorder, model)

    def _deliver(self, report: Any, *_: float | None) -> None:
        if self._recorder is not None:
            self._recorder(report)
        for writer in self._writers:
            writer(report)
