# SPDX-License-Identifier: Apache-2.0
"""A Lightning callback that records a run, and logs it to the trainer's loggers."""

from typing import Any

from lossscale.diagnostics.loggers.base import WindowWriter
from lossscale.diagnostics.loggers.packages import import_package
from lossscale.diagnostics.loggers.reports import ReportFollower
from lossscale.diagnostics.records.recorder import Recorder
from lossscale.diagnostics.records.steps import read_report
from lossscale.errors import SettingTypeError

_Callback: Any = import_package("lightning.pytorch", "LightningCallback").Callback


class LightningCallback(_Callback):  # type: ignore[misc]  # Lightning is read as Any
    """Records every step of a `Trainer` whose scaler is `lossscale.torch.GradScaler`.

    With the loss that the training step returned (of the last micro-batch, where
    gradients are accumulated) and the first learning rate of the optimizer. Nothing is
    waited for: a step is recorded when its numbers have arrived.
    """

    def __init__(self, recorder: Recorder | None = None, *, every: int = 50) -> None:
        """Choose what is written.

        Args:
            recorder: Records the run, if it is given. It is flushed when the training
                ends, and closed by you.
            every: How many steps are summed up for the trainer's loggers.
        """
        super().__init__()
        self._recorder = recorder
        self._every = every
        self._writer: _TrainerWriter | None = None
        self._follower: ReportFollower | None = None
        self._lr: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the scaler."""
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        if not hasattr(scaler, "last_step"):
            message = (
                "LightningCallback reads lossscale.torch.GradScaler; the trainer has "
                f"{type(scaler).__name__}. Pass plugins=MixedPrecision('16-mixed', "
                "device, scaler=GradScaler(...)) to the Trainer."
            )
            raise SettingTypeError(message)
        self._writer = _TrainerWriter(trainer, every=self._every)
        self._follower = ReportFollower(scaler, self._deliver)
        if self._recorder is not None:
            scaler.attach(self._recorder, pl_module)

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        """Keep the learning rate: schedulers move it before the batch ends."""
        del trainer, pl_module
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        """Take the step of the batch, if there was one."""
        del trainer, pl_module
        if self._follower is not None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._follower.poll(loss, self._lr)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what is left."""
        del trainer, pl_module
        if self._follower is not None and self._writer is not None:
            self._follower.finish()
            self._writer.flush()
        if self._recorder is not None:
            self._recorder.flush()

    def _deliver(self, report: Any, loss: float | None, lr: float | None) -> None:
        if self._recorder is not None:
            self._recorder.note(report.index, loss=loss, lr=lr)
            self._recorder(report)
        if self._writer is not None:
            self._writer.write_step(read_report(report)._replace(loss=loss, lr=lr))


class _TrainerWriter(WindowWriter):
    """Writes to every logger of a trainer."""

    def __init__(self, trainer: Any, *, every: int) -> None:
        super().__init__(every=every)
        self._trainer = trainer

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a window."""
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=step)
