# SPDX-License-Identifier: Apache-2.0
"""`explain`: runs a batch again and says why it was not finite. The order of calls."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lossscale.core.explanation.causes import find_causes
from lossscale.core.explanation.findings import Explanation, Finding, Trial
from lossscale.core.explanation.trials import scales_to_try
from lossscale.core.validation import format_value
from lossscale.errors import ContextError, SettingError, SettingTypeError
from lossscale.torch.explain import ranks
from lossscale.torch.explain.description import describe, describe_late
from lossscale.torch.explain.events import Event
from lossscale.torch.explain.gradients import GradientWatch
from lossscale.torch.explain.losses import LossCount
from lossscale.torch.explain.modules import ModuleTracker, Names
from lossscale.torch.explain.snapshot import Snapshot
from lossscale.torch.explain.stand_ins import StandIns
from lossscale.torch.explain.watch import OperatorWatch
from lossscale.torch.explain.write_guard import WriteGuard

if TYPE_CHECKING:
    from lossscale.torch.distributed.rank_groups import RankGroups

StepFunction: TypeAlias = Callable[[], object]
"""Runs one batch, forward and backward; or returns the loss before it is scaled."""

_ENTERED_TWICE = r"Using `torch.compile\(module\)` when there are global hooks"


def explain(
    step_function: StepFunction,
    model: torch.nn.Module | None,
    scaler: torch.amp.GradScaler,
    scale: float,
    rank_groups: "RankGroups",
) -> Explanation:
    """Run a batch again under hooks, and return why it was not finite.

    Args:
        step_function: What runs the batch.
        model: The model whose weights, buffers and gradients are kept.
        scaler: The scaler that the function uses.
        scale: Its scale.
        rank_groups: The groups that the scaler was given.
    """
    model = _check_arguments(step_function, model)
    run = _Run(step_function, model, scaler)
    snapshot = Snapshot(model)
    guard = WriteGuard(model.parameters())
    try:
        own = run.watch(scale, snapshot, guard)
        groups = ranks.find_groups(model, run.entered, rank_groups)
        seen = ranks.collect(own, groups)
        trials = []
        if _may_help(seen.values()):
            ratios = [part.first.ratio for part in seen.values() if part.first]
            ratio = max((one for one in ratios if one is not None), default=None)
            for lower in scales_to_try(scale, ratio):
                finite = run.is_finite_at(lower, snapshot, guard)
                finite = all(ranks.collect(finite, groups).values())
                trials.append(Trial(lower, finite))
                if finite:
                    break
    finally:
        guard.restore()
        snapshot.restore()
    return _join(seen, tuple(trials), groups)


def _check_arguments(
    step_function: object, model: torch.nn.Module | None
) -> torch.nn.Module:
    """Return the model, or raise."""
    if not callable(step_function):
        message = (
            "explain() takes a function that runs one batch, forward and backward, got "
            f"{format_value(step_function)}. Write scaler.explain(lambda: "
            "scaler.scale(loss_function(model(x), y)).backward())."
        )
        raise SettingTypeError(message)
    if model is None:
        message = (
            "explain() needs the model, to name its modules and to keep its weights. "
            "Write scaler.explain(step_function, module=model), or make the scaler "
            "with GradScaler(module=model)."
        )
        raise SettingError(message)
    if not isinstance(model, torch.nn.Module):
        message = f"module must be a torch.nn.Module, got {format_value(model)}."
        raise SettingTypeError(message)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        message = (
            "explain() reads numbers on the host, which is impossible while a CUDA "
            "graph is being captured. Call it before or after."
        )
        raise ContextError(message)
    return model


class _Run:
    """Runs the batch, with what is needed to watch it."""

    def __init__(
        self,
        step_function: StepFunction,
        model: torch.nn.Module,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self._step_function = step_function
        self._model = model
        self._scaler = scaler
        self._names = Names(model)
        self.entered: list[torch.nn.Module] = []
        """The modules that the batch went through."""

    def watch(self, scale: float, snapshot: Snapshot, guard: WriteGuard) -> Explanation:
        """Run the batch at its scale and inspect every operator."""
        tracker = ModuleTracker()
        watch = OperatorWatch(self._model, self._names, tracker)
        gradients = GradientWatch(
            self._model, self._names, watch.event_of, watch.losses.note_gradient
        )
        losses: list[Event | None] = []

        def note_loss(loss: torch.Tensor) -> None:
            losses.append(watch.event_of(loss))
            watch.losses.note_scaled()

        stand_ins = StandIns(self._scaler, scale, note_loss, gradients.check_all)
        snapshot.begin_run()
        with guard, gradients, tracker:
            self._run(stand_ins, gradients, watch)
        self.entered = list(tracker.entered)
        parts = [*self._model.modules(), *self.entered]
        notes = (*note_compiled(parts), *watch.notes())
        return conclude(self._names, gradients, losses, watch.losses, scale, notes)

    def is_finite_at(self, scale: float, snapshot: Snapshot, guard: WriteGuard) -> bool:
        """Run the batch at another scale; return whether all gradients are finite."""
        gradients = GradientWatch(self._model, self._names, lambda _: None)
        stand_ins = StandIns(self._scaler, scale, lambda _: None, gradients.check_all)
        snapshot.begin_run()
        with guard, gradients:
            self._run(stand_ins, gradients, None)
        return gradients.is_finite

    def _run(
        self,
        stand_ins: StandIns,
        gradients: GradientWatch,
        watch: OperatorWatch | None,
    ) -> None:
        """Run the batch once, and raise if it was no forward and backward pass."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # torch warns that a compiled module is entered twice: no harm is done.
            warnings.filterwarnings("ignore", message=_ENTERED_TWICE)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(register_optimizer_step_pre_hook(_refuse_step).remove)
            stack.enter_context(stand_ins)
            if watch is not None:
                stack.enter_context(watch)
            result = self._step_function()
            is_loss = isinstance(result, torch.Tensor) and result.requires_grad
            if is_loss and not gradients.has_arrived and not stand_ins.is_scale_used:
                stand_ins.scale(result).backward()
            gradients.check_all()
        if not gradients.has_arrived:
            message = (
                "The step function ran no backward pass that reached a parameter of "
                "the model. It must call scaler.scale(loss).backward() for one batch, "
                f"or return the loss; it returned {format_value(result)}."
            )
            raise ContextError(message)
        if not stand_ins.is_scale_used:
            message = (
                "The step function called backward() on a loss that was not scaled. "
                "It must call scaler.scale(loss).backward(), or return the loss."
            )
            raise ContextError(message)


def note_compiled(modules: Iterable[torch.nn.Module]) -> tuple[str, ...]:
    """Return what cannot be seen of modules that are compiled."""
    if not any(map(_is_compiled, modules)):
        return ()
    note = (
        "Compiled modules were run without their compiled code, which may keep "
        "intermediate results in float32."
    )
    return (note,)


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is compiled, by torch.compile or by its own method."""
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or getattr(module, "_compiled_call_impl", None) is not None


def _refuse_step(optimizer: Any, *_: Any) -> NoReturn:
    """Raise before an optimizer is stepped."""
    message = (
        f"The step function called step() of {type(optimizer).__name__} directly, "
        "which would change the weights. Give explain() the forward and the backward "
        "pass alone; scaler.step(optimizer) may stay, it does nothing there."
    )
    raise ContextError(message)


def conclude(
    names: Names,
    gradients: GradientWatch,
    losses: list[Event | None],
    count: LossCount,
    scale: float,
    notes: tuple[str, ...],
) -> Explanation:
    """Return what one rank saw in one run.

    Args:
        names: The names of the model.
        gradients: The gradients of its parameters.
        losses: For each loss that was scaled, the event that wrote it; `None` if it
            was finite.
        count: How many losses there were.
        scale: The scale.
        notes: What could not be seen.
    """
    loss = next((event for event in losses if event is not None), None)
    ends = [loss] if loss else [end for end in gradients.nonfinite.values() if end]
    found = find_causes(ends)
    findings: list[Finding | None] = [
        None if event is None else describe(event, names, gradients, loss, count)
        for event in found
    ]
    if findings[0] is None and gradients.late:
        findings[0] = describe_late(*next(iter(gradients.late.items())))
    last, broken = gradients.bracket()
    return Explanation(
        scale=scale,
        finite=gradients.is_finite and loss is None,
        loss_finite=loss is None if losses else None,
        first=findings[0],
        first_nan=findings[1],
        last_finite_gradient=last,
        first_nonfinite_gradient=broken,
        notes=notes,
    )


def _may_help(seen: Iterable[Explanation]) -> bool:
    """Whether lower scales are worth a try: all that went wrong did so in gradients.

    A loss that is not finite may be made of gradients: that of a gradient penalty.
    """
    parts = list(seen)
    if all(part.finite for part in parts):
        return False
    return all(part.finite or part.may_depend_on_scale for part in parts)


def _join(
    seen: dict[int, Explanation], trials: tuple[Trial, ...], groups: list[Any]
) -> Explanation:
    """Return what this rank saw, with the trials and the other ranks."""
    if not groups:
        return replace(seen[0], trials=trials)
    own = torch.distributed.get_rank()
    parts = {
        rank: replace(part, rank=rank, trials=trials) for rank, part in seen.items()
    }
    others = tuple(parts[rank] for rank in sorted(parts) if rank != own)
    return replace(parts[own], others=others)
