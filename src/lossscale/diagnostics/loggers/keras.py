# SPDX-License-Identifier: Apache-2.0
"""A Keras callback that records a run."""

from collections.abc import Sequence
from typing import Any

from lossscale.diagnostics.loggers.base import StepWriter
from lossscale.diagnostics.loggers.packages import import_package
from lossscale.diagnostics.records.recorder import Recorder
from lossscale.diagnostics.records.steps import StepRecord
from lossscale.errors import SettingTypeError

_Callback: Any = import_package("keras", "KerasCallback").callbacks.Callback


class KerasCallback(_Callback):  # type: ignore[misc]  # Keras is read as Any
    """Records every batch of `fit` whose optimizer is ours.

    Reading the optimizer waits for the device, and on JAX copies its variables back:
    with `every`, some batches are recorded and the others are not.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        writers: Sequence[StepWriter] = (),
        *,
        every: int = 1,
    ) -> None:
        """Choose what is written.

        Args:
            recorder: Records the run, if it is given. It is flushed when the training
                ends, and closed by you.
            writers: Handed every step as well, such as a `TensorBoardWriter`.
            every: Record one batch of so many.
        """
        super().__init__()
        self._recorder = recorder
        self._writers = tuple(writers)
        self._every = every
        self._step = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer."""
        del logs
        optimizer = self.model.optimizer
        if not hasattr(optimizer, "last_step"):
            message = (
                "KerasCallback reads lossscale.keras.LossScaleOptimizer; the model has "
                f"{type(optimizer).__name__}. Compile it with "
                "optimizer=lossscale.keras.LossScaleOptimizer(...)."
            )
            raise SettingTypeError(message)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Record the batch."""
        del batch
        self._step += 1
        if self._step % self._every:
            return
        last = self.model.optimizer.last_step
        loss = (logs or {}).get("loss")
        record = StepRecord(
            self._step,
            scale=float(last.scale),
            applied=not bool(last.skipped),
            loss=None if loss is None else float(loss),
        )
        if record.skipped:
            nonfinite = tuple(last.nonfinite.items())
            record = record._replace(cause=last.reason, nonfinite=nonfinite)
        if self._recorder is not None:
            self._recorder.record(
                scale=record.scale,
                applied=record.applied,
                step=record.step,
                cause=record.cause,
                loss=record.loss,
                nonfinite=record.nonfinite,
            )
        for writer in self._writers:
            writer.write_step(record)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write what is left."""
        del logs
        for writer in self._writers:
            writer.flush()
        if self._recorder is not None:
            self._recorder.flush()
