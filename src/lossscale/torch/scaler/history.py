# SPDX-License-Identifier: Apache-2.0
"""`StepHistory`: delivers reports in order, and warns when nothing is being trained.

Reports go to the `on_step` callback, to the schedulers that ask for applied steps, and
to the collapse warning, as they arrive on the host.
"""

import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from lossscale.core import validation
from lossscale.core.explanation.numbers import format_number
from lossscale.core.validation import format_value
from lossscale.errors import CollapseError, CollapseWarning, SettingTypeError
from lossscale.torch.calls import stack_level_of_caller
from lossscale.torch.scaler.report import OptimizerRef, StepReport, is_same_optimizer

if TYPE_CHECKING:
    from lossscale.core.explanation import Explanation

OnStep: TypeAlias = Callable[[StepReport], object]
"""Called with the report of every step, in order, when it has arrived."""


class StepHistory:
    """The reports of a scaler: those on their way, and the last one."""

    def __init__(
        self,
        on_step: OnStep | None,
        max_consecutive_skips: int | None,
        *,
        raises_on_collapse: bool,
        on_alarm: Callable[[], None] | None = None,
    ) -> None:
        self.last: StepReport | None = None
        self.on_step = on_step
        self._max_consecutive_skips = max_consecutive_skips
        self._raises_on_collapse = raises_on_collapse
        self._on_alarm = on_alarm
        self.has_penalties = False
        """Whether a loss may be made of gradients of a scaled loss."""
        self.explanation: Explanation | None = None
        """What was seen of the batch after the alarm."""
        self._pending: deque[StepReport] = deque()
        self._newest: StepReport | None = None
        """The last one that was delivered."""
        self._taken: deque[tuple[int, list[tuple[OptimizerRef, bool]]]] | None = None
        """Which optimizers took which steps; `None` until a scheduler asks."""
        self._skipped: deque[StepReport] = deque(maxlen=256)
        self._consecutive_skips = 0

    def make_empty(self) -> "StepHistory":
        """Return an empty history with the same limits and no callback."""
        return StepHistory(
            None,
            self._max_consecutive_skips,
            raises_on_collapse=self._raises_on_collapse,
        )

    def add(self, report: StepReport, *, applied: bool | None) -> None:
        """Take a report, and deliver those that have arrived.

        Args:
            report: The report.
            applied: Whether every optimizer took its step; `None` if that is not known
                on the host yet.
        """
        self.last = report
        if applied is not None and not self._pending:
            self._deliver(report, applied=applied)
            return
        try:
            self.deliver_ready()  # which may raise what a callback raises
        finally:
            if report.is_final:  # not captured in a CUDA graph
                self._pending.append(report)
        if applied is not None:
            self.deliver_ready()

    def deliver_ready(self, *, wait: bool = False) -> None:
        """Deliver the reports that have arrived, in order.

        Args:
            wait: Wait for the device until all of them have.

        Raises:
            CollapseError: If that many consecutive steps were skipped.
        """
        while self._pending and (wait or self._pending[0].is_ready()):
            report = self._pending.popleft()
            self._deliver(report, applied=report.applied)

    def count_applied_since(
        self, index: int, optimizer: torch.optim.Optimizer
    ) -> tuple[int, int]:
        """Return how many steps after one an optimizer took, and the last known."""
        if self._taken is None:
            self._taken = deque(maxlen=4096)
            if self._newest is not None:
                self._taken.append((self._newest.index, self._newest.outcomes()))
        count, last = 0, index
        for number, outcomes in reversed(self._taken):  # the newest first
            if number <= index:
                break
            last = max(last, number)
            count += any(
                applied
                for reference, applied in outcomes
                if is_same_optimizer(reference(), optimizer)
            )
        return count, last

    def _deliver(self, report: StepReport, *, applied: bool) -> None:
        self._newest = report
        if self._taken is not None:
            self._taken.append((report.index, report.outcomes()))
        if self.on_step is not None:
            self.on_step(report)
        if applied:
            if self._consecutive_skips:
                self._skipped.clear()
                self._consecutive_skips = 0
        elif report.is_refused:
            self._count_skip(report)

    def _count_skip(self, report: StepReport) -> None:
        """Count a skipped step, and warn when there are too many in a row."""
        self._skipped.append(report)
        self._consecutive_skips += 1
        limit = self._max_consecutive_skips
        if limit is None or self._consecutive_skips % limit:
            return
        if not self._raises_on_collapse and self._consecutive_skips > limit:
            return  # said once
        message = _describe_collapse(
            self._consecutive_skips,
            list(self._skipped),
            has_penalties=self.has_penalties,
        )
        if self._raises_on_collapse:
            raise CollapseError(message)
        if self._on_alarm is not None:
            self._on_alarm()
            message += " The next batch is watched, and explained when it is over."
        warnings.warn(message, CollapseWarning, stacklevel=stack_level_of_caller())


def make_history(
    on_step: OnStep | None,
    max_consecutive_skips: int | None,
    on_collapse: object,
    on_alarm: Callable[[], None] | None,
) -> StepHistory:
    """Return the history that the constructor's arguments describe, or raise."""
    validation.check_choice("on_collapse", on_collapse, ("warn", "raise", "explain"))
    if isinstance(on_step, type) or (on_step is not None and not callable(on_step)):
        hint = ""
        if isinstance(on_step, type):
            hint = f" Write on_step={on_step.__name__}(...)."
        message = (
            "on_step must be a function of a StepReport, got "
            f"{format_value(on_step)}.{hint}"
        )
        raise SettingTypeError(message)
    if max_consecutive_skips is not None:
        validation.check_count("max_consecutive_skips", max_consecutive_skips)
    return StepHistory(
        on_step,
        max_consecutive_skips,
        raises_on_collapse=on_collapse == "raise",
        on_alarm=on_alarm,
    )


def _describe_collapse(
    count: int, reports: list[StepReport], *, has_penalties: bool
) -> str:
    """Return what was seen while all steps were skipped, and what to try."""
    scales = [format_number(report.scale) for report in reports]
    if len(scales) > _LISTED:
        scales = [*scales[:3], "...", *scales[-2:]]
    reasons = [report.reason for report in reports]
    kinds = ("inf", "nan", "loss", "headroom")
    counts = [f"{reasons.count(kind)} {kind}" for kind in kinds if kind in reasons]
    first = list(reports[0].nonfinite.items())[:_LISTED]
    names = ", ".join(f"{name} ({reason})" for name, reason in first) or "unknown"
    return (
        f"{count} consecutive steps were skipped; nothing is being trained. Scales: "
        f"{'; '.join(scales)}. Reasons: {', '.join(counts)}. First tensors that kept a "
        f"step from being applied: {names}. "
        f"{_advise(reports[-_LAST:], has_penalties=has_penalties)}"
    )


def _advise(reports: list[StepReport], *, has_penalties: bool) -> str:
    """Return what follows from the last steps, and no more than that."""
    reasons = {report.reason for report in reports}
    scales = [report.scale for report in reports]
    if reasons == {"loss"} and has_penalties:
        return (
            "The loss was not finite before it was scaled. It is made of gradients "
            "(scaler.grad), which may be overflowing because of the scale: "
            "scaler.explain(step_function) tries lower ones, and names the layer and "
            "the operation."
        )
    if reasons == {"loss"}:
        return (
            "The loss was not finite before it was scaled, so no scale helps, unless "
            "the loss is made of gradients of a scaled one (a gradient penalty): look "
            "for the cause in the forward pass (float16 activations beyond 65504, a "
            "division by 0, a model that was trained in bfloat16) or in the weights. "
            "scaler.explain(step_function) names the layer and the operation."
        )
    if reasons == {"headroom"}:
        return (
            "The unscaled gradients are finite and too large for the optimizer to "
            "square, so no scale can help: clip them with clip_grad_norm_(), or lower "
            "the learning rate."
        )
    if scales[-1] <= 1.0:
        return (
            "The gradients are not finite at a scale of 1 or below, so the scale is "
            "not the cause: scaler.explain(step_function) names the layer and the "
            "operation. Otherwise keep the layers of these tensors in float32."
        )
    if scales[0] == scales[-1]:
        return (
            "The scale has not moved: give the scaler a lower one, or a policy that "
            "lowers it."
        )
    is_known = all(report.loss_finite for report in reports)
    start = "The loss was finite, so the" if is_known else "The"
    return (
        f"{start} gradients may be overflowing because of the scale, which is still "
        "being lowered; a NaN can come of that too (inf - inf). Start from a lower "
        "scale to get there sooner."
    )


_LAST = 3
"""How many of the last steps the advice is based on."""

_LISTED = 6
"""How many scales or names a message lists."""
