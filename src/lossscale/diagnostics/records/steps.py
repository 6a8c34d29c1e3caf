# SPDX-License-Identifier: Apache-2.0
"""One step as it is recorded, and how it is read from a framework's step report.

Imports the standard library only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lossscale.core.validation import format_value
from lossscale.errors import SettingTypeError

CAUSES = ("inf", "nan", "headroom", "loss", "not stepped")
"""Why a step may have been skipped: an infinite or NaN gradient, a finite one that the
optimizer cannot square, a loss that was not finite, or a `step` that was not called."""

Nonfinite = tuple[tuple[str, str], ...]
"""The tensors that kept a step from being applied: pairs of a name and a cause."""


class StepRecord(NamedTuple):
    """What one training step did. `None` where something was not measured.

    Example:
        >>> from lossscale.diagnostics import StepRecord
        >>> StepRecord(step=1, scale=65536.0, applied=False, cause="inf").skipped
        True
    """

    step: int
    """Which step of the run it is."""
    time: float = 0.0
    """Seconds since the run was started."""
    scale: float = 1.0
    """The scale that the step's gradients carried."""
    applied: bool = True
    """Whether the step was applied; otherwise it was skipped."""
    norm: float | None = None
    """The norm of the unscaled gradients."""
    clip: float | None = None
    """The factor that clipping multiplied the gradients by; 1 if it left them."""
    amax: float | None = None
    """The largest finite magnitude of the unscaled gradients."""
    loss: float | None = None
    """The unscaled loss."""
    lr: float | None = None
    """The learning rate."""
    cause: str | None = None
    """Why the step was skipped, one of `CAUSES`; `None` if it was applied."""
    nonfinite: Nonfinite = ()
    """The tensors that were not finite, each with "inf" or "nan" (or "headroom")."""
    nearest_finite: str | None = None
    """The finite tensor next to those, towards the loss. The backward pass computed it
    last before a gradient broke, so the two bracket the layer at fault."""

    @property
    def skipped(self) -> bool:
        """Whether the step was not applied."""
        return not self.applied


class ReportLike(Protocol):
    """What a recorder reads of a framework's step report.

    `lossscale.torch.StepReport` is one. A report may have three attributes more: `loss`
    and `lr`, as numbers that the host has, and `statistics`, a `TensorStatistics` on
    the steps for which `Recorder.wants_statistics` is true, and `None` on all others.
    """

    @property
    def index(self) -> int:
        """Which step of the scaler it is, from 1."""

    @property
    def scale(self) -> float:
        """The scale that the gradients carried."""

    @property
    def applied(self) -> bool:
        """Whether the step was applied."""

    @property
    def reason(self) -> str | None:
        """Why it was not, one of `CAUSES`."""

    @property
    def norm(self) -> float | None:
        """The norm of the unscaled gradients."""

    @property
    def clip(self) -> float:
        """The factor that clipping multiplied them by."""

    @property
    def amax(self) -> float | None:
        """Their largest finite magnitude, unscaled."""

    @property
    def nonfinite(self) -> Mapping[str, str]:
        """The tensors that were not finite, each with "inf", "nan" or "headroom"."""


def read_report(report: ReportLike) -> StepRecord:
    """Return what a framework's step report says.

    The only function that reads a report's attributes.

    Raises:
        SettingTypeError: If it is no report.
    """
    try:
        return _read_report(report)
    except AttributeError as error:
        if error.obj is not report or error.name not in _READ:
            raise  # the report's own code failed
        message = (
            "A step report is expected, such as on_step is given them, got "
            f"{format_value(report)}, which has no {error.name!r}. To record numbers, "
            "call recorder.record(scale=..., applied=...)."
        )
        raise SettingTypeError(message) from None


_READ = ("index", "scale", "applied", "reason", "norm", "clip", "amax", "nonfinite")


def _read_report(report: ReportLike) -> StepRecord:
    applied = bool(report.applied)
    pairs = () if applied else report.nonfinite.items()
    return StepRecord(
        step=int(report.index),
        scale=float(report.scale),
        applied=applied,
        norm=_optional(report.norm),
        clip=_optional(report.clip),
        amax=_optional(report.amax),
        loss=_optional(getattr(report, "loss", None)),
        lr=_optional(getattr(report, "lr", None)),
        cause=None if applied else str(report.reason),
        nonfinite=tuple((str(name), str(cause)) for name, cause in pairs),
    )


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def find_nearest_finite(
    nonfinite: Nonfinite, names: Sequence[str], positions: Mapping[str, int]
) -> str | None:
    """Return the tensor next to the non-finite ones, towards the loss.

    Gradients flow from the loss down, in the reverse order of the model's tensors. The
    first that broke is therefore the last of the non-finite ones in the model's order,
    and the tensor after it is the nearest that stayed finite.

    Args:
        nonfinite: The non-finite tensors of a step.
        names: Every tensor, in the model's order: that of the forward pass.
        positions: Where each name is in `names`.

    Returns:
        Its name; `None` if the last tensor is not finite, or a name is unknown.
    """
    found = [positions.get(name, -1) for name, _ in nonfinite]
    if not found or min(found) < 0:
        return None
    after = max(found) + 1
    return names[after] if after < len(names) else None
