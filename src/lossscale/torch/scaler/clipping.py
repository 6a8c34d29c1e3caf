# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm: in the same read as the check, or after unscaling."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from lossscale.core import validation
from lossscale.core.validation import format_value
from lossscale.errors import SettingError
from lossscale.torch.inspection.groups import GradientScale
from lossscale.torch.inspection.host import make_number
from lossscale.torch.inspection.inspector import Inspection
from lossscale.torch.inspection.ranked import measure_over_ranks
from lossscale.torch.inspection.request import InspectionRequest
from lossscale.torch.inspection.summary import (
    FOUND_INF,
    GRAD_SCALE,
    NORM,
    TOO_LARGE,
)
from lossscale.torch.scaler.fused_optimizers import takes_scaler
from lossscale.torch.scaler.gradient_checker import CallContext, GradientChecker
from lossscale.torch.scaler.iteration import OptimizerStep


class ClipOptions(NamedTuple):
    """What to clip to, and how."""

    max_norms: tuple[float, ...]
    """One for all gradients, or one for each parameter group."""
    norm_type: float = 2.0
    per_group: bool = False
    error_if_nonfinite: bool = False
    write_back: bool = False
    fits_one_read: bool = True
    """Whether the check of the gradients can measure this norm as well."""


def parse_clip_options(
    optimizer: torch.optim.Optimizer,
    max_norm: float | Sequence[float],
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    write_back: bool,
) -> ClipOptions:
    """Return what to clip to and by which norm, or raise."""
    expected = "a positive number, or one for each parameter group"
    per_group = isinstance(max_norm, (list, tuple))
    max_norms = tuple(max_norm) if isinstance(max_norm, Sequence) else (max_norm,)
    if isinstance(max_norm, str):
        max_norms = (max_norm,)
    groups = len(optimizer.param_groups)
    if per_group and len(max_norms) != groups:
        message = (
            f"max_norm must be {expected}: the optimizer has {groups} groups, got "
            f"{format_value(max_norm)}."
        )
        raise SettingError(message)
    # Infinity measures the norm, and clips nothing.
    numbers = [
        math.inf
        if isinstance(number, float) and number == math.inf
        else validation.check_number("max_norm", number, expected)
        for number in max_norms
    ]
    if min(numbers) <= 0.0:
        message = f"max_norm must be {expected}, got {format_value(max_norm)}."
        raise SettingError(message)
    order = math.inf
    if norm_type != math.inf:
        order = _parse_order(norm_type)
    return ClipOptions(
        tuple(numbers),
        order,
        per_group,
        validation.check_bool("error_if_nonfinite", error_if_nonfinite),
        validation.check_bool("write_back", write_back),
        fits_one_read=not per_group and order in _MEASURED_ORDERS,
    )


_MEASURED_ORDERS = (2.0, math.inf)


def _parse_order(norm_type: float) -> float:
    """Return the order of a norm, or raise."""
    expected = "a positive number such as 2.0, or math.inf"
    order = validation.check_number("norm_type", norm_type, expected)
    if order <= 0.0:
        message = f"norm_type must be {expected}, got {norm_type!r}."
        raise SettingError(message)
    return order


def clip_unscaled(
    optimizer: torch.optim.Optimizer, options: ClipOptions
) -> torch.Tensor:
    """Clip gradients that carry no scale, by torch's function.

    The caller may have changed them since they were checked: they are measured again
    and, as everywhere in torch, not checked again.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if not options.per_group:
        groups = [[param for group in groups for param in group]]
    norms = [
        torch.nn.utils.clip_grad_norm_(
            params, max_norm, options.norm_type, options.error_if_nonfinite
        )
        for params, max_norm in zip(groups, options.max_norms, strict=True)
    ]
    return torch.stack(norms) if options.per_group else norms[0]


def clip_in_one_read(
    step: OptimizerStep,
    clip: ClipOptions,
    checker: GradientChecker,
    context: CallContext,
    *,
    allow_fp16: bool,
) -> torch.Tensor | None:
    """Check and clip gradients that are still scaled, in one read.

    Returns:
        Their norm, 0 if there are none; `None` if they must be unscaled first.
    """
    optimizer = step.optimizer
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    divides = bool(is_fused) and not clip.write_back and not takes_scaler(optimizer)
    request = InspectionRequest(
        max_norm=clip.max_norms[0],
        norm_type=clip.norm_type,
        measure_norm=True,
        as_grad_scale=divides,
    )
    collected = checker.inspector.collect(optimizer)
    if collected.groups is None:
        if collected.plan is None:
            # Nothing counts as unscaled: the gradients may come later.
            return empty_norm(clip, context.tensor.device)
    elif collected.groups.is_foreign:
        return None
    elif clip.norm_type == math.inf and any(map(torch.is_complex, collected.grads)):
        return None  # the check reads both parts as numbers of their own
    found_inf, inspection = checker.check(
        optimizer,
        step,
        request,
        context,
        allow_fp16=allow_fp16 or divides,
        collected=collected,
    )
    if inspection is None:
        return None
    numbers = inspection.summary.numbers
    if isinstance(numbers, list):
        norm = make_number(numbers[NORM])
        grad_scale = make_number(numbers[GRAD_SCALE]) if divides else None
    else:
        norm, grad_scale = numbers[NORM], numbers[GRAD_SCALE]
    if clip.error_if_nonfinite:
        raise_if_nonfinite(norm, clip.norm_type)
    if divides:
        step.grad_scale = grad_scale
        step.inspection = inspection
    else:
        step.is_unscaling = True
        inspection.rescale_()
    step.clipped = True
    step.mark_unscaled(found_inf, context.iteration.losses)
    return norm


def clip_after_unscaling(
    step: OptimizerStep,
    clip: ClipOptions,
    checker: GradientChecker,
    context: CallContext,
) -> torch.Tensor:
    """Clip gradients that were unscaled before, over all ranks if there are several."""
    optimizer = step.optimizer
    if checker.inspector.plan_for(optimizer) is None:
        norm = clip_unscaled(optimizer, clip)
    elif clip.per_group:
        pairs = zip(optimizer.param_groups, clip.max_norms, strict=True)
        norms = [
            _clip_over_ranks(
                cast("torch.optim.Optimizer", _ParamGroupView(group)),
                _options_for_group(clip, max_norm),
                checker,
                context,
            )
            for group, max_norm in pairs
        ]
        norm = torch.stack(norms)
    else:
        norm = _clip_over_ranks(optimizer, clip, checker, context)
    _clear_too_large(step, norm, max(clip.max_norms))
    return norm


def _options_for_group(clip: ClipOptions, max_norm: float) -> ClipOptions:
    """Return the options for one parameter group of several."""
    fits = clip.norm_type in _MEASURED_ORDERS
    return clip._replace(max_norms=(max_norm,), per_group=False, fits_one_read=fits)


class _ParamGroupView:
    """One parameter group, in the place of an optimizer."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.param_groups = [group]
        self.state: dict[Any, Any] = {}


def _clip_over_ranks(
    optimizer: torch.optim.Optimizer,
    clip: ClipOptions,
    checker: GradientChecker,
    context: CallContext,
) -> torch.Tensor:
    """Clip unscaled gradients by the norm of all ranks' shards."""
    grads, groups, plan = collected = checker.inspector.collect(optimizer)
    if plan is None or (groups is not None and groups.is_foreign):
        return clip_unscaled(optimizer, clip)
    if not clip.fits_one_read:
        message = (
            f"norm_type={clip.norm_type:g} cannot be measured over several ranks. Use "
            "2.0 or math.inf."
        )
        raise SettingError(message)
    unit = torch.ones((), dtype=torch.float32, device=context.tensor.device)
    request = InspectionRequest(
        max_norm=clip.max_norms[0],
        norm_type=clip.norm_type,
        measure_norm=True,
        check_headroom=False,
    )
    summary, found_inf, _ = measure_over_ranks(
        groups, grads, plan, GradientScale(unit), request, context.for_ranks()
    )
    inspection = Inspection(summary, found_inf, collected)
    norm = inspection.summary.slot(NORM)
    if clip.error_if_nonfinite:
        raise_if_nonfinite(norm, clip.norm_type)
    inspection.rescale_()
    return norm


def empty_norm(options: ClipOptions, device: torch.device | str) -> torch.Tensor:
    """Return the norm of no gradients."""
    shape = (len(options.max_norms),) if options.per_group else ()
    return torch.zeros(shape, device=device)


def raise_if_nonfinite(norm: torch.Tensor, norm_type: float) -> None:
    """Raise as torch does; that waits for the device."""
    if not math.isfinite(norm.item()):
        message = (
            f"The total norm of order {norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To skip the step "
            "instead, leave error_if_nonfinite out."
        )
        raise RuntimeError(message)


def _clear_too_large(step: OptimizerStep, norm: torch.Tensor, max_norm: float) -> None:
    """Let a step be applied whose gradients were too large before they were clipped."""
    summary = step.summary
    if summary is None or not summary.is_within_headroom(max_norm):
        return
    numbers = summary.numbers
    is_measured = (norm.detach().max() <= validation.FLOAT32_MAX).to(torch.float32)
    if isinstance(numbers, list):
        factor: float | torch.Tensor = 1.0 - numbers[TOO_LARGE] * is_measured.item()
    else:
        factor = 1.0 - numbers[TOO_LARGE] * is_measured.to(numbers.device)
    for index in (FOUND_INF, TOO_LARGE):
        numbers[index] = numbers[index] * factor  # type: ignore[assignment]
    for flag in step.found_inf.values():
        flag.mul_(factor if isinstance(factor, float) else factor.to(flag.device))
