# SPDX-License-Identifier: Apache-2.0
"""The outcome of an iteration: from the flags of its optimizers to a `Signal`.

The scale is lowered by gradients that overflowed, and by micro-batches that did,
although those skip nothing. It is held if a step was skipped only because finite
gradients are too large, or, if the policy asks for it, because the loss was not finite.
"""

from collections.abc import Callable

import torch
from torch.amp.grad_scaler import OptState

from lossscale.torch.inspection import eager
from lossscale.torch.inspection.groups import any_flag, make_flag
from lossscale.torch.inspection.request import InspectionRequest
from lossscale.torch.inspection.summary import (
    FOUND_INF,
    LOSS,
    TOO_LARGE,
    GradientSummary,
)
from lossscale.torch.scaler.iteration import Iteration, OptimizerStep, TorchState
from lossscale.torch.scaler.report import OptimizerOutcome
from lossscale.torch.scaler.scale_update import HostOutcome, ScaleUpdate, StepOutcome


def collect_outcomes(
    iteration: Iteration,
    flagged: list[TorchState],
    scale: torch.Tensor,
    steps_itself: Callable[[], bool],
) -> list[OptimizerOutcome]:
    """Return what became of each optimizer, with the flags as they are now.

    Args:
        iteration: The iteration that ends.
        flagged: torch's states that have flags.
        scale: The scale.
        steps_itself: Returns whether a subclass overrides `step`, and may not record
            it.
    """
    if not flagged:  # a step without gradients counts as finite
        flag = make_flag(0.0, scale.device)
        return [OptimizerOutcome(_no_optimizer, GradientSummary.of_flag(flag, scale))]
    outcomes = []
    for state in flagged:
        flags = list(state["found_inf_per_device"].values())
        flag = flags[0] if len(flags) == 1 else any_flag(flags, scale.device)
        step = iteration.steps.get(id(state))
        stepped = state["stage"] is OptState.STEPPED or steps_itself()
        if step is None or step.summary is None:
            # An optimizer or a subclass has recorded the flag by itself.
            summary = GradientSummary.of_flag(flag.reshape(()), scale)
            outcomes.append(OptimizerOutcome(_no_optimizer, summary, stepped))
        else:
            numbers = step.summary.numbers
            if isinstance(numbers, list):
                numbers[FOUND_INF] = flag.item()
            else:
                step.summary.set_found_inf(flag)
            outcomes.append(OptimizerOutcome(step.reference, step.summary, stepped))
    return outcomes


def _no_optimizer() -> None:
    """Return no optimizer: which one recorded the flag is not known."""
    return


def host_outcome(
    iteration: Iteration, outcomes: list[OptimizerOutcome], device: torch.device
) -> HostOutcome:
    """Return what happened in a step, as Python booleans."""
    skipped = overflowed = False
    all_stepped = True
    for outcome in outcomes:
        all_stepped = all_stepped and outcome.stepped
        numbers = outcome.summary.numbers
        if numbers[FOUND_INF]:
            skipped = True
            overflowed = overflowed or not numbers[TOO_LARGE]
    loss = iteration.loss_nonfinite
    if iteration.micro_batches:
        overflowed = overflowed or any(
            bool(batch.overflowed) for batch in iteration.micro_batches
        )
        loss = _find_hold_flag(iteration, device)
    return HostOutcome(
        overflowed,
        skipped,
        skipped and not overflowed,
        None if loss is None else bool(loss),
        all_stepped and not skipped,
    )


def device_outcome(
    iteration: Iteration, outcomes: list[OptimizerOutcome], device: torch.device
) -> StepOutcome:
    """Return what happened in a step, as tensors on a device."""
    micro_batches = [batch.overflowed for batch in iteration.micro_batches]
    raw_loss = _merge_losses(iteration.raw_losses, device)
    first = outcomes[0].summary
    numbers = first.numbers
    summary = numbers if isinstance(numbers, torch.Tensor) else None
    if summary is not None and summary.device != device:
        if raw_loss is not None:
            summary[LOSS].copy_(~torch.isfinite(raw_loss))
        raw_loss = summary = None
    if len(outcomes) == 1 and not micro_batches:
        # `too_large` outweighs `found_inf`, which is why the two may be one flag.
        flags = first.header_on(device) if summary is None else summary
        skipped_at, too_large_at = FOUND_INF, TOO_LARGE
    else:
        skipped = any_flag(
            [outcome.summary.slot(FOUND_INF) for outcome in outcomes], device
        )
        overflowed = [outcome.summary.overflowed() for outcome in outcomes]
        found_inf = any_flag([*overflowed, *micro_batches], device)
        flags = torch.stack([found_inf, skipped, skipped * (1.0 - found_inf)])
        skipped_at, too_large_at = 1, 2
    loss = _find_hold_flag(iteration, device)
    return StepOutcome(flags, skipped_at, too_large_at, loss, raw_loss, summary)


def find_measurements(
    outcomes: list[OptimizerOutcome], update: ScaleUpdate, device: torch.device
) -> torch.Tensor | None:
    """Return one summary of all optimizers; `None` if the policy reads flags alone."""
    summaries = [outcome.summary for outcome in outcomes]
    if update.is_builtin or not all(summary.is_measured for summary in summaries):
        return None
    buffers = [summary.to_buffer() for summary in summaries]
    if len(buffers) == 1:
        return buffers[0]
    return eager.combine(buffers, device, InspectionRequest(measure_norm=True))


def skip_together(steps: list[OptimizerStep], device: torch.device) -> None:
    """Have all optimizers skip if one of them does."""
    flags = [flag for step in steps for flag in step.found_inf.values()]
    skipped = any_flag(flags, device)
    summaries = [step.summary for step in steps if step.summary is not None]
    if len(summaries) == len(steps):  # else a subclass has checked by itself
        overflowed = any_flag([summary.overflowed() for summary in summaries], device)
        for summary in summaries:
            summary.set_too_large(skipped * (1.0 - overflowed))
    for flag in flags:
        flag.copy_(skipped)


def _find_hold_flag(iteration: Iteration, device: torch.device) -> torch.Tensor | None:
    """Return 1.0 if a loss that was not finite holds the scale; `None` if unknown.

    It does unless gradients of another micro-batch overflowed as well.
    """
    losses = [
        batch.loss_nonfinite
        for batch in iteration.micro_batches
        if batch.loss_nonfinite is not None
    ]
    if not losses:
        return iteration.loss_nonfinite
    overflowed = [batch.overflowed for batch in iteration.micro_batches]
    return any_flag(losses, device) * (1.0 - any_flag(overflowed, device))


def _merge_losses(
    losses: list[torch.Tensor], device: torch.device
) -> torch.Tensor | None:
    """Return one number that is finite if all losses on the device are."""
    if not losses:
        return None
    first = losses[0]
    is_flat = first.dim() == 0 and first.dtype is torch.float32
    if len(losses) == 1 and is_flat and first.device == device:
        return first
    flat = [
        loss.reshape(()).to(device, torch.float32, non_blocking=True) for loss in losses
    ]
    return flat[0] if len(flat) == 1 else torch.stack(flat).abs().amax()
