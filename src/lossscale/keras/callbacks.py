# SPDX-License-Identifier: Apache-2.0
"""A callback that writes the loss scale into the logs."""

import warnings
from typing import Any

import keras

from lossscale.core import validation
from lossscale.errors import SettingTypeError
from lossscale.keras.backend import read
from lossscale.keras.optimizer import LossScaleOptimizer


class LossScaleLogger(keras.callbacks.Callback):
    """Writes `loss_scale`, `skipped_steps` and `consecutive_skips` into the logs.

    `History`, `CSVLogger`, `TensorBoard` and the progress bar show what is in the logs;
    callbacks of yours must come after this one in the list. At the end of an epoch,
    `skipped_steps` are those of the epoch. Reading waits for the device, so that
    happens once an epoch unless `every` asks for more.

    Example:
        >>> from lossscale.keras import LossScaleLogger
        >>> callbacks = [LossScaleLogger(every=100, warn_after=20)]
    """

    def __init__(self, every: int | None = None, warn_after: int | None = None) -> None:
        """Choose how often to read the optimizer.

        Args:
            every: Write into the logs of every so many batches too.
            warn_after: Warn when a read finds so many steps skipped in a row: the
                scale falls and nothing is learnt.
        """
        super().__init__()
        self.every = (
            None if every is None else validation.check_count("every", every, "batches")
        )
        self.warn_after = (
            None
            if warn_after is None
            else validation.check_count("warn_after", warn_after, "skipped steps")
        )
        self._before = 0
        self._batches_read = 0
        self._warned = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer."""
        del logs
        if not isinstance(self.model.optimizer, LossScaleOptimizer):
            message = (
                "LossScaleLogger reads lossscale.keras.LossScaleOptimizer; the model "
                f"has {type(self.model.optimizer).__name__}. Compile it with "
                "optimizer=lossscale.keras.LossScaleOptimizer(...)."
            )
            raise SettingTypeError(message)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember how many steps had been skipped."""
        del epoch, logs
        self._before = int(self.model.optimizer.last_step.skipped_steps)
        self._batches_read = 0

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Write into the logs of every so many batches."""
        if self.every is None:
            return
        # Several batches may pass at once, with steps_per_execution.
        if (batch + 1) // self.every > self._batches_read // self.every:
            self._write(logs)
        self._batches_read = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write into the logs of the epoch."""
        del epoch
        self._write(logs)

    def _write(self, logs: dict[str, Any] | None) -> None:
        """Read the optimizer's variables, once."""
        # On JAX fit holds the variables, and an access to self.model returns them:
        # here, and not at every batch.
        optimizer = self.model.optimizer
        last = optimizer.last_step
        consecutive = int(last.consecutive_skips)
        if logs is not None:
            logs["loss_scale"] = float(read(optimizer.dynamic_scale))
            logs["skipped_steps"] = int(last.skipped_steps) - self._before
            logs["consecutive_skips"] = consecutive
        if self.warn_after is None or consecutive < self.warn_after:
            self._warned = False
        elif not self._warned:
            self._warned = True
            message = (
                f"{consecutive} steps in a row were skipped: their gradients were not "
                f"finite at a loss scale of {float(last.scale)!r}. If the loss itself "
                "is NaN, no scale helps."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
