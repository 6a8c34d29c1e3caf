# SPDX-License-Identifier: Apache-2.0
"""What became of a step: a report that waits for nothing until it is read.

A `StepReport` holds the verdicts of the step on their device, and the copies that are
on their way to the host. `History` hands reports over in order as they arrive: to the
observer, to the schedulers, and to the alarm that goes off when nothing but skipped
steps come in.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lossscale.core.validation import format_value
from lossscale.errors import CollapseError, CollapseWarning, SettingTypeError
from lossscale.torch.gradients import parameters
from lossscale.torch.verdict import Reason, Seen, Verdict


class Part(NamedTuple):
    """What one optimizer had to do with a step."""

    optimizer: Any
    """A weak reference to it."""
    verdict: Verdict
    stepped: bool = True
    """Whether `step` was called for it, and came to its end."""


class StepReport:
    """One step of a scaler: applied or skipped, why, at which scale.

    Every attribute is read from a copy that left the device when the step was taken.
    Asked at once, the first one waits for it; asked a step later, it has arrived.

    Example:
        >>> import torch, lossscale.torch as ls
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = ls.GradScaler("cpu", init_scale=8.0, names=[("weight", weight)])
        >>> scaler.scale((weight * float("inf")).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> step = scaler.last_step
        >>> step.applied, step.reason, step.scale, step.culprits
        (False, 'inf', 8.0, ('weight',))
    """

    def __init__(
        self,
        index: int,
        parts: tuple[Part, ...],
        names: Any,
        loss: Any,
        *,
        loss_nonfinite: bool | None = None,
    ) -> None:
        """Keep what a step saw.

        Args:
            index: Which step of this scaler it is, from 1; a resumed one starts anew.
            parts: The verdicts of its optimizers.
            names: Gives a parameter's name, or `None`.
            loss: Whether the loss was finite, a verdict likewise; `None` if the policy
                does not ask for it.
            loss_nonfinite: Whether the loss was not finite, if the host knows.
        """
        self.index = index
        self.parts = parts
        self._names = names
        self._loss = loss
        self._loss_nonfinite = loss_nonfinite
        self._numbers: list[Seen] | None = None

    def arrived(self) -> bool:
        """Whether reading would not wait for the device."""
        return all(part.verdict.arrived() for part in self.parts)

    @property
    def applied(self) -> bool:
        """Whether every optimizer took its step."""
        return all(finite for _, finite in self.taken())

    @property
    def skipped(self) -> bool:
        """Whether any optimizer did not take its step."""
        return not self.applied

    @property
    def reason(self) -> Reason | None:
        """Why the step was skipped; `None` if it was not.

        "loss" if the loss was not finite, "nan" or "inf" if a gradient was not, and
        "headroom" if all were finite and one too large for the optimizer to square (or,
        with SGD, to add up): then the scale stays, because no lower one would help.
        "not stepped" if nothing was wrong and `step` was not called, or raised.
        """
        if self.applied:
            return None
        if all(seen.finite for seen in self._seen()):
            return "not stepped"
        if self.loss_finite is False:
            return "loss"
        if any(seen.nan for seen in self._seen()):
            return "nan"
        skipped = [seen for seen in self._seen() if not seen.finite]
        return "headroom" if all(seen.too_large for seen in skipped) else "inf"

    @property
    def scale(self) -> float:
        """The scale that the gradients carried."""
        return self._seen()[0].scale

    @property
    def norm(self) -> float | None:
        """The norm of the unscaled gradients; `None` where nothing measured it."""
        norms = [seen.norm for seen in self._seen()]
        if any(norm is None for norm in norms):
            return None
        return norms[0] if len(norms) == 1 else math.hypot(*filter(None, norms))

    @property
    def amax(self) -> float | None:
        """The largest magnitude of the tensors that are finite, unscaled as `norm` is.

        `None` where nothing measured it. A GPU's kernels always do; elsewhere it takes
        another read of the gradients: `GradScaler(measure_amax=True)` asks for it.
        """
        seen = self._seen()
        return max((s.amax / s.scale for s in seen if s.amax is not None), default=None)

    @property
    def clip(self) -> float:
        """The smallest factor that clipping multiplied gradients by.

        1 where they were clipped after `unscale_` or `accumulate`.
        """
        return min(seen.clip for seen in self._seen())

    @property
    def loss_finite(self) -> bool | None:
        """Whether the loss was finite before it was scaled; `None` if it is not known.

        It is known if it was one number: then looking at it costs no wait.
        """
        if self._loss is not None:
            finite: bool = self._loss.seen().finite
            return finite
        known = [seen.loss_nonfinite for seen in self._seen()] + [self._loss_nonfinite]
        flags = [nonfinite for nonfinite in known if nonfinite is not None]
        return not any(flags) if flags else None

    @property
    def culprits(self) -> tuple[str, ...]:
        """The names of the tensors that were not finite."""
        return tuple(name for name, _ in self.broken)

    @property
    def broken(self) -> tuple[tuple[str, Reason], ...]:
        """The names of the tensors that were not finite, each with "inf" or "nan".

        If all were finite, of those that were too large, each with "headroom".
        """
        found: list[tuple[str, Reason]] = []
        for part in self.parts:
            optimizer = part.optimizer()
            for place, reason in part.verdict.broken():
                name = name_of(optimizer, place, self._names)
                found.append((name, reason))
        return tuple(found)

    def taken(self) -> list[tuple[Any, bool]]:
        """Return weak references to the optimizers, each with whether it stepped."""
        pairs = zip(self.parts, self._seen(), strict=True)
        return [(part.optimizer, seen.finite and part.stepped) for part, seen in pairs]

    def applied_by(self, optimizer: Any) -> bool | None:
        """Whether one optimizer took its step; `None` if it had no part in this one."""
        for stepped, finite in self.taken():
            if _is(stepped(), optimizer):
                return finite
        return None

    def _seen(self) -> list[Seen]:
        # In a CUDA graph the same buffers are written again and again.
        if self._numbers is None or not all(p.verdict.stays for p in self.parts):
            self._numbers = [part.verdict.seen() for part in self.parts]
        return self._numbers

    def __repr__(self) -> str:
        """Return what can be said without waiting for the device."""
        if not self.arrived():
            return f"StepReport(index={self.index}, not arrived)"
        if self.applied:
            return f"StepReport(index={self.index}, applied, scale={self.scale:g})"
        return (
            f"StepReport(index={self.index}, skipped, reason={self.reason!r}, "
            f"scale={self.scale:g}, culprits={self.culprits})"
        )


def _is(stepped: Any, optimizer: Any) -> bool:
    """Whether an optimizer is the one that was stepped, or the one in it.

    Some packages step a wrapper, and hand the wrapped one to the scheduler.
    """
    return (
        stepped is optimizer
        or getattr(stepped, "optimizer", None) is optimizer
        or (stepped is not None and getattr(optimizer, "optimizer", None) is stepped)
    )


Observer = Callable[[StepReport], object]
"""What is told of every step, in order, when its report has arrived."""


class History:
    """The reports of a scaler: on their way, and the last that arrived."""

    KEPT = 256

    def __init__(
        self, observer: Observer | None, limit: int | None, on_collapse: str
    ) -> None:
        self.last: StepReport | None = None
        self._observer = observer
        self._limit = limit
        self._on_collapse = on_collapse
        self._coming: deque[StepReport] = deque()
        self._known: deque[tuple[int, list[tuple[Any, bool]]]] = deque(maxlen=4096)
        """Which optimizers took which steps; no more than that is kept so long."""
        self._row: deque[StepReport] = deque(maxlen=self.KEPT)
        self._in_a_row = 0

    def emptied(self) -> "History":
        """Return one of the same settings that knows of nothing, and tells nobody."""
        return History(None, self._limit, self._on_collapse)

    def add(self, report: StepReport) -> None:
        """Take a report; those that have arrived are handed on."""
        self.last = report
        self.receive()
        if all(part.verdict.stays for part in report.parts):
            self._coming.append(report)
        if all(part.verdict.buffer.device.type == "cpu" for part in report.parts):
            self.receive()

    def receive(self, *, wait: bool = False) -> None:
        """Hand on what has arrived, in order.

        Args:
            wait: Wait for the device until everything has.

        Raises:
            CollapseError: If that many steps in a row were skipped.
        """
        while self._coming and (wait or self._coming[0].arrived()):
            report = self._coming.popleft()
            self._known.append((report.index, report.taken()))
            if self._observer is not None:
                self._observer(report)
            self._watch(report)

    def after(self, index: int, optimizer: Any) -> tuple[int, int]:
        """Return how many steps after one an optimizer took, and the last known."""
        taken, last = 0, index
        for number, parts in reversed(self._known):  # the newest first, and few of them
            if number <= index:
                break
            last = max(last, number)
            taken += any(
                finite for stepped, finite in parts if _is(stepped(), optimizer)
            )
        return taken, last

    def _watch(self, report: StepReport) -> None:
        """Count skipped steps in a row, and say so when they are too many."""
        if report.reason == "not stepped":
            return  # the caller may have stepped the optimizer without the scaler
        if report.applied:
            self._row.clear()
            self._in_a_row = 0
            return
        self._row.append(report)
        self._in_a_row += 1
        if self._limit is None or self._in_a_row % self._limit:
            return
        message = _collapse(self._in_a_row, list(self._row))
        if self._on_collapse == "raise":
            raise CollapseError(message)
        if self._in_a_row == self._limit:
            warnings.warn(message, CollapseWarning, stacklevel=4)


def _collapse(count: int, reports: list[StepReport]) -> str:
    """Say what was seen while nothing but skipped steps came in, and what to try."""
    scales = [report.scale for report in reports]
    shown = [f"{scale:g}" for scale in scales]
    if len(shown) > _MOST:
        shown = [*shown[:3], "...", *shown[-2:]]
    reasons = [report.reason for report in reports]
    every = ("inf", "nan", "loss", "headroom")
    counts = [f"{reasons.count(r)} {r}" for r in every if r in reasons]
    first = reports[0].broken[:_MOST]
    names = ", ".join(f"{name} ({reason})" for name, reason in first) or "unknown"
    return (
        f"{count} steps in a row were skipped; nothing is being trained. "
        f"Scales: {', '.join(shown)}. Reasons: {', '.join(counts)}. First tensors that "
        f"kept a step from being applied: {names}. {_advice(reports)}"
    )


def _advice(reports: list[StepReport]) -> str:
    """Say what follows from the last steps, and no more than that."""
    last = reports[-_LAST:]
    reasons = {report.reason for report in last}
    scales = [report.scale for report in last]
    if reasons == {"loss"}:
        return (
            "The loss was not finite before it was scaled, so no scale can help: look "
            "for the cause in the forward pass (float16 activations beyond 65504, a "
            "division by 0, a model that was trained in bfloat16) or in the weights."
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
            "not the cause: look for it in the backward pass, for example with "
            "torch.autograd.detect_anomaly(), or keep the named tensors' layers in "
            "float32."
        )
    if scales[0] == scales[-1]:
        return (
            "The scale has not moved: give the scaler a lower one, or a policy that "
            "lowers it."
        )
    known = all(report.loss_finite for report in last)
    start = "The loss was finite, so the" if known else "The"
    return (
        f"{start} gradients may be overflowing because of the scale, which is still "
        "being lowered; a NaN can come of that too (inf - inf). Start from a lower "
        "scale to get there sooner."
    )


_LAST = 3
"""How many of the last steps advice is based on."""

_MOST = 6
"""How many scales or names a message lists."""


class Names:
    """The names of parameters, as far as they are known; holds none of them alive."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self._known = WeakIdKeyDictionary()
        try:
            known = [(name, parameter) for name, parameter in pairs]
        except (TypeError, ValueError):
            known = [("", None)]
        for name, parameter in known:
            if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
                message = (
                    "names must be pairs of a name and a parameter, such as "
                    f"model.named_parameters(); got {format_value(pairs)}."
                )
                raise SettingTypeError(message)
            self._known[parameter] = name

    def get(self, parameter: Any) -> str | None:
        """Return the name of a parameter, or `None`."""
        name: str | None = self._known.get(parameter)
        return name


def name_of(optimizer: Any, place: int, names: Names | None) -> str:
    """Return the name of an optimizer's parameter; if it has none, where it stands."""
    if optimizer is None:
        return f"parameter {place} of an optimizer that is gone"
    every = parameters(optimizer)
    if place >= len(every):
        return f"parameter {place}, which the optimizer no longer has"
    known = None if names is None else names.get(every[place])
    if known is not None:
        return known
    for number, group in enumerate(optimizer.param_groups):
        size = len(group["params"])
        if place < size:
            listed = group.get("param_names")
            if listed is not None:
                return str(listed[place])
            shape = tuple(group["params"][place].shape)
            return f"param_groups[{number}]['params'][{place}] of shape {shape}"
        place -= size
    return f"parameter {place}"


def weakly(optimizer: Any) -> Any:
    """Return a weak reference, or what stands for one."""
    try:
        return ref(optimizer)
    except TypeError:  # slots without __weakref__
        return lambda: optimizer
