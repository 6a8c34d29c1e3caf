# SPDX-License-Identifier: Apache-2.0
"""The steps of a record as columns: what a backtest reads of them.

A record of ten million steps has 600 MB of text. It is read in pieces, and 22 bytes are
kept of each step.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lossscale.diagnostics.records.columns import read_columns
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.records.steps import CAUSES
from lossscale.diagnostics.sequences import Floats, Scales

Flags = npt.NDArray[np.bool_]
OnProgress = Callable[[], object]

_PIECE = 64
"""How many blocks are read at once: 65,536 steps."""


@dataclass(frozen=True, eq=False)
class RecordedSteps:
    """The steps of a run, in their order."""

    numbers: npt.NDArray[np.int64]
    """Which step of the run each is."""
    scales: Scales
    """The scale of its gradients."""
    magnitudes: Floats
    """The largest finite magnitude of its unscaled gradients; NaN if not measured."""
    causes: npt.NDArray[np.uint8]
    """0 if it was applied, else one more than the cause's index in `CAUSES`."""
    broken_loss: Flags
    """Whether a loss was recorded that is not finite."""

    @property
    def size(self) -> int:
        """How many steps there are."""
        return self.scales.size

    def skipped_by(self, *causes: str) -> Flags:
        """Return which steps were skipped by one of these causes."""
        codes = [1 + CAUSES.index(cause) for cause in causes]
        return np.asarray(np.isin(self.causes, codes))

    @property
    def finite(self) -> Flags:
        """Which steps had gradients that fit their format.

        Those whose `step` was not called are among them.
        """
        return np.asarray((self.causes == 0) | self.skipped_by("not stepped"))

    def before(self, number: int) -> "RecordedSteps":
        """Return the steps before one of the run."""
        end = int(np.searchsorted(self.numbers, number))
        columns = (getattr(self, field.name)[:end] for field in fields(self))
        return RecordedSteps(*columns)

    @property
    def held(self) -> Flags:
        """Which steps were skipped and say nothing about the scale.

        Their gradients were finite, and too large for the optimizer.
        """
        return self.skipped_by("headroom")

    @property
    def overflows(self) -> Flags:
        """Which steps had a gradient, or a loss, that was not finite."""
        return self.skipped_by("inf", "nan", "loss")


def read_steps(run: RunFile, on_piece: OnProgress | None = None) -> RecordedSteps:
    """Read all steps of a run.

    Args:
        run: The run.
        on_piece: Called after every 65,536 steps.
    """
    pieces = []
    for start in range(0, len(run.blocks), _PIECE):
        columns = read_columns(run, run.blocks[start : start + _PIECE])
        with np.errstate(over="ignore"):
            scales = columns.scale.astype(np.float32)
        pieces.append(
            (
                columns.step,
                scales,
                np.where(np.isfinite(columns.amax), np.abs(columns.amax), np.nan),
                columns.cause,
                np.isinf(columns.loss),
            )
        )
        if on_piece is not None:
            on_piece()
    if not pieces:
        nothing = np.zeros(0)
        return RecordedSteps(
            nothing.astype(np.int64),
            nothing.astype(np.float32),
            nothing,
            nothing.astype(np.uint8),
            nothing.astype(np.bool_),
        )
    parts = [np.concatenate(part) for part in zip(*pieces, strict=True)]
    return RecordedSteps(*parts)
