# SPDX-License-Identifier: Apache-2.0
"""A Keras callback that records a run."""

import math
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

    With the loss of the batch, the learning rate, and the policy and the variables of
    the model. Keras hands no gradients to callbacks: there is no norm, no largest
    magnitude and no statistics of tensors.

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
            every: Record one batch of so many; its loss is then the mean of them.
        """
        super().__init__()
        self._recorder = recorder
        self._writers = tuple(writers)
        self._every = every
        self._step = 0 if recorder is None else recorder.last_step
        self._losses = _BatchLosses()
        self._is_described = False

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

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start again with the losses, whose mean Keras takes over the epoch."""
        del epoch, logs
        self._losses = _BatchLosses()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Record the batch."""
        del batch
        self._step += 1
        if self._step % self._every:
            return
        # Once: on JAX every access copies the variables back.
        model = self.model
        last = model.optimizer.last_step
        if not self._is_described:
            self._describe(model)
        record = StepRecord(
            self._step,
            scale=float(last.scale),
            applied=not bool(last.skipped),
            loss=self._losses.take(model, logs or {}),
            lr=float(model.optimizer.learning_rate),
        )
        if record.skipped:
            nonfinite = tuple(last.nonfinite.items())
            cause = "loss" if self._has_bad_loss(record) else last.reason
            record = record._replace(cause=cause, nonfinite=nonfinite)
        if self._recorder is not None:
            self._recorder.record(
                scale=record.scale,
                applied=record.applied,
                step=record.step,
                cause=record.cause,
                loss=record.loss,
                lr=record.lr,
                nonfinite=record.nonfinite,
            )
        for writer in self._writers:
            writer.write_step(record)

    def _has_bad_loss(self, record: StepRecord) -> bool:
        """Whether the loss of the batch itself is known not to be finite."""
        is_of_batch = self._every == 1 and self._losses.are_of_batches
        loss = record.loss
        return is_of_batch and loss is not None and not math.isfinite(loss)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write what is left."""
        del logs
        for writer in self._writers:
            writer.flush()
        if self._recorder is not None:
            self._recorder.flush()

    def _describe(self, model: Any) -> None:
        self._is_described = True
        if self._recorder is None:
            return
        variables = model.trainable_variables
        dtypes = {variable.path: str(variable.dtype) for variable in variables}
        device = getattr(variables[0].value, "device", None) if variables else None
        self._recorder.describe(
            policy=model.optimizer.policy,
            device=None if device is None else str(device),
            names=list(dtypes),
            dtypes=dtypes,
        )


class _BatchLosses:
    """The losses of batches, out of the mean over the epoch that Keras keeps."""

    def __init__(self) -> None:
        self._total = 0.0
        self._count = 0.0
        self.are_of_batches = False
        """Whether they are; a model without such a mean may report any other."""

    def take(self, model: Any, logs: dict[str, Any]) -> float | None:
        """Return the mean loss of the batches since the last call.

        A total that is not finite stays so until the epoch is over: the losses after
        it are not known. A model that keeps no such mean reports what its logs say.
        """
        tracker = next((m for m in model.metrics if m.name == "loss"), None)
        total, count = (getattr(tracker, name, None) for name in ("total", "count"))
        self.are_of_batches = total is not None and count is not None
        if total is None or count is None:
            loss = logs.get("loss")
            return None if loss is None else float(loss)
        before, self._total = self._total, float(total)
        weight, self._count = float(count) - self._count, float(count)
        if not math.isfinite(before) or weight <= 0:
            return None
        return (self._total - before) / weight
