# SPDX-License-Identifier: Apache-2.0
"""`StepReport`: what became of a step; waits for nothing until it is read."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lossscale.core.statistics import TensorStatistics
from lossscale.torch.inspection.groups import any_flag
from lossscale.torch.inspection.statistics import SampledTensors
from lossscale.torch.inspection.summary import (
    FOUND_INF,
    GradientSummary,
    HostSummary,
    Reason,
)
from lossscale.torch.scaler.param_names import ParamNames

OptimizerRef: TypeAlias = Callable[[], torch.optim.Optimizer | None]
"""A weak reference to an optimizer."""


@dataclass(eq=False)
class OptimizerOutcome:
    """What one optimizer had to do with a step."""

    optimizer: OptimizerRef
    summary: GradientSummary
    stepped: bool = True
    """Whether `step` was called for it, and returned."""


@dataclass(eq=False, repr=False)
class StepReport:
    """One step of a scaler: applied or skipped, why, at which scale.

    Every attribute is read from a copy that left the device when the step was taken.
    Asked at once, the first one waits for it; asked a step later, it has arrived.

    Example:
        >>> import torch, lossscale.torch as ls
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = ls.GradScaler("cpu", init_scale=8.0, names=[("weight", weight)])
        >>> scaler.scale(weight.sum()).backward()
        >>> weight.grad[0] = torch.inf
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> step = scaler.last_step
        >>> step.applied, step.reason, step.scale, step.nonfinite_names
        (False, 'inf', 8.0, ('weight',))
    """

    index: int
    """Which step of this scaler it is, from 1; a resumed scaler starts from 1 again."""
    _outcomes: list[OptimizerOutcome]
    _names: ParamNames
    _host_loss_nonfinite: bool | None
    _device_loss: GradientSummary | None
    _sampled: SampledTensors | None = None
    _host: list[HostSummary] | None = None

    def is_ready(self) -> bool:
        """Whether reading would not wait for the device."""
        ready = all(outcome.summary.is_ready() for outcome in self._outcomes)
        return ready and (self._sampled is None or self._sampled.is_ready())

    @property
    def is_final(self) -> bool:
        """Whether its numbers will not change; a CUDA graph writes its own again."""
        return all(outcome.summary.is_final for outcome in self._outcomes)

    @property
    def applied(self) -> bool:
        """Whether every optimizer took its step."""
        return all(applied for _, applied in self.outcomes())

    @property
    def skipped(self) -> bool:
        """Whether any optimizer did not take its step."""
        return not self.applied

    @property
    def is_refused(self) -> bool:
        """Whether any gradient kept its optimizer from stepping.

        Without one, a step that was not applied may have been taken by the caller.
        """
        return any(outcome.summary.skips_step() for outcome in self._outcomes)

    @property
    def reason(self) -> Reason | None:
        """Why the step was not applied; `None` if it was.

        "loss" if the loss was not finite, "nan" or "inf" if a gradient was not, and
        "headroom" if all were finite and one too large for the optimizer to square (or,
        with SGD, to add up): then the scale stays, because no lower one would help.
        "not stepped" if all was finite and `step` was not called, or raised.
        """
        if self.applied:
            return None
        summaries = self._on_host()
        if all(summary.finite for summary in summaries):
            return "not stepped"
        if self.loss_finite is False:
            return "loss"
        if any(summary.nan for summary in summaries):
            return "nan"
        skipped = [summary for summary in summaries if not summary.finite]
        return "headroom" if all(summary.too_large for summary in skipped) else "inf"

    @property
    def scale(self) -> float:
        """The scale of the gradients."""
        return self._on_host()[0].scale

    @property
    def norm(self) -> float | None:
        """The norm of the unscaled gradients; `None` if it was not measured."""
        norms = [summary.norm for summary in self._on_host()]
        measured = [norm for norm in norms if norm is not None]
        if len(measured) < len(norms):
            return None
        return measured[0] if len(measured) == 1 else math.hypot(*measured)

    @property
    def amax(self) -> float | None:
        """The largest magnitude of the tensors that are finite, unscaled as `norm` is.

        `None` if it was not measured. A GPU's kernels always measure it; elsewhere it
        takes another read of the gradients: `GradScaler(measure_amax=True)` asks for
        it.
        """
        summaries = self._on_host()
        return max(
            (s.amax / s.scale for s in summaries if s.amax is not None), default=None
        )

    @property
    def clip(self) -> float:
        """The smallest factor that clipping multiplied gradients by.

        1 where they were clipped after `unscale_` or `accumulate`.
        """
        return min(summary.clip for summary in self._on_host())

    @property
    def loss_finite(self) -> bool | None:
        """Whether the loss was finite before it was scaled; `None` if it is not known.

        It is known if it was one number: then checking it costs no wait.
        """
        if self._device_loss is not None:
            return self._device_loss.on_host().finite
        of_summaries = [summary.loss_nonfinite for summary in self._on_host()]
        flags = [
            flag
            for flag in (*of_summaries, self._host_loss_nonfinite)
            if flag is not None
        ]
        return not any(flags) if flags else None

    @property
    def nonfinite_names(self) -> tuple[str, ...]:
        """The names of the tensors that kept the step from being applied."""
        return tuple(self.nonfinite)

    @property
    def nonfinite(self) -> dict[str, Reason]:
        """The names of the tensors that were not finite, each with "inf" or "nan".

        If all were finite, the names of those that were too large, with "headroom".
        """
        return {
            self._names.name_of(outcome.optimizer(), index): reason
            for outcome in self._outcomes
            for index, reason in outcome.summary.nonfinite()
        }

    @property
    def statistics(self) -> TensorStatistics | None:
        """What every gradient looked like, scaled and in its own format.

        `None` unless the `on_step` callback has a method `wants_statistics` that
        returned true for the index of this step, as a `Recorder` does every 50 steps.
        Of a DTensor it describes the shard of this rank. Its `updates` is what the
        optimizers of `lossscale.torch.optim` have added to their weights; `None` if
        none of them took the step.
        """
        return None if self._sampled is None else self._sampled.read()

    def applied_by(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Whether one optimizer took its step; `None` if it had no part in this one."""
        for reference, applied in self.outcomes():
            if is_same_optimizer(reference(), optimizer):
                return applied
        return None

    def applied_on(self, device: torch.device) -> torch.Tensor:
        """Return whether every optimizer took its step, as a tensor; without a wait."""
        flags = [outcome.summary.slot(FOUND_INF) for outcome in self._outcomes]
        all_stepped = all(outcome.stepped for outcome in self._outcomes)
        return (any_flag(flags, device) == 0) & all_stepped

    def outcomes(self) -> list[tuple[OptimizerRef, bool]]:
        """Return weak references to the optimizers, each with whether it stepped."""
        return [
            (outcome.optimizer, outcome.stepped and not outcome.summary.skips_step())
            for outcome in self._outcomes
        ]

    def _on_host(self) -> list[HostSummary]:
        if self._host is None or not self.is_final:
            self._host = [outcome.summary.on_host() for outcome in self._outcomes]
        return self._host

    def __repr__(self) -> str:
        """Return what can be said without waiting for the device."""
        if not self.is_ready():
            return f"StepReport(index={self.index}, not ready)"
        if self.applied:
            return f"StepReport(index={self.index}, applied, scale={self.scale:g})"
        return (
            f"StepReport(index={self.index}, skipped, reason={self.reason!r}, "
            f"scale={self.scale:g}, nonfinite_names={self.nonfinite_names})"
        )


def is_same_optimizer(stepped: object, optimizer: object) -> bool:
    """Whether an optimizer is the one that was stepped, or the one that it wraps.

    Some packages step a wrapper, and give the wrapped optimizer to the scheduler.
    """
    return stepped is not None and (
        stepped is optimizer
        or getattr(stepped, "optimizer", None) is optimizer
        or getattr(optimizer, "optimizer", None) is stepped
    )
