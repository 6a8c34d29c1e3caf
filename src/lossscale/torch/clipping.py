# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm, in the same read as the check.

An optimizer that takes `grad_scale` is handed one divisor for scale and clipping, and
no gradient is written; for others the gradients are multiplied once. Where others have
a say in how gradients are looked at, or where they are unscaled already, torch's own
function clips them.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import OptState

from lossscale.core import validation
from lossscale.errors import SettingError
from lossscale.torch import handover
from lossscale.torch.eager import Request
from lossscale.torch.gradients import FirstGradient, collected
from lossscale.torch.verdict import DIVISOR, NORM

_LOOKS = ("_unscale_grads_", "unscale_", "_check_inf_per_device")
"""Who overrides one of these wants every look at gradients to go through it."""


class Clip(NamedTuple):
    """What to clip to, and how; the arguments of `clip_grad_norm_`."""

    max_norms: tuple[float, ...]
    """One for all gradients, or one for each parameter group."""
    norm_type: float = 2.0
    per_group: bool = False
    error_if_nonfinite: bool = False
    write_back: bool = False

    @property
    def in_one_read(self) -> bool:
        """Whether the check of the gradients can measure this norm as well."""
        return not self.per_group and self.norm_type in (2.0, math.inf)


def check_arguments(
    optimizer: Any,
    max_norm: Any,
    norm_type: Any,
    *,
    error_if_nonfinite: bool,
    write_back: bool,
) -> Clip:
    """Return what to clip to and by which norm, or raise."""
    expected = "a positive number, or one for each parameter group"
    per_group = isinstance(max_norm, (list, tuple))
    max_norms = tuple(max_norm) if per_group else (max_norm,)
    groups = len(optimizer.param_groups)
    if per_group and len(max_norms) != groups:
        message = (
            f"max_norm must be {expected}: the optimizer has {groups} groups, got "
            f"{validation.format_value(max_norm)}."
        )
        raise SettingError(message)
    numbers = []
    for number in max_norms:
        # Infinity measures, and clips nothing.
        is_infinite = isinstance(number, float) and number == math.inf
        numbers.append(
            number
            if is_infinite
            else validation.check_number("max_norm", number, expected)
        )
    if min(numbers) <= 0.0:
        message = (
            f"max_norm must be {expected}, got {validation.format_value(max_norm)}."
        )
        raise SettingError(message)
    order = norm_type if norm_type == math.inf else _order(norm_type)
    return Clip(
        tuple(numbers),
        float(order),
        per_group,
        validation.check_bool("error_if_nonfinite", error_if_nonfinite),
        validation.check_bool("write_back", write_back),
    )


def _order(norm_type: Any) -> float:
    """Return the order of a norm, or raise."""
    expected = "a positive number such as 2.0, or math.inf"
    order = validation.check_number("norm_type", norm_type, expected)
    if order <= 0.0:
        message = f"norm_type must be {expected}, got {norm_type!r}."
        raise SettingError(message)
    return order


def clip(scaler: Any, optimizer: Any, wanted: Clip) -> Any:
    """Clip the gradients of an optimizer for a scaler; return their norm."""
    state = scaler._unstepped(optimizer)
    if scaler._iteration.of(state).clipped:
        message = (
            "clip_grad_norm_() has already been called on this optimizer since the "
            "last update()."
        )
        raise RuntimeError(message)
    if state["stage"] is OptState.READY:
        has_sum = id(optimizer) in scaler._iteration.sums
        if not has_sum and nothing_to_clip(scaler, optimizer):
            shape = (len(wanted.max_norms),) if wanted.per_group else ()
            return torch.zeros(shape, device=scaler._scale.device)
        alone = not any(map(scaler._overrides, _LOOKS))
        if alone and not has_sum and wanted.in_one_read:
            norm = _in_one_read(scaler, optimizer, state, wanted)
            if norm is not None:
                return norm
        scaler.unscale_(optimizer)
    norm = _clip_unscaled(scaler, optimizer, wanted)
    _lift_headroom(scaler, state, norm, max(wanted.max_norms))
    return norm


def nothing_to_clip(scaler: Any, optimizer: Any) -> bool:
    """Whether there is no gradient, here or on a rank that waits for this one.

    Then nothing counts as unscaled: the gradients may come later.
    """
    if collected(optimizer) or any(map(scaler._overrides, _LOOKS)):
        return False
    return scaler._plan(optimizer) is None


def clip_without_scale(optimizer: Any, wanted: Clip) -> Any:
    """Clip gradients that carry no scale, by torch's function.

    The caller may have changed them since they were checked: they are measured again
    and, as everywhere in torch, not checked again.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if not wanted.per_group:
        groups = [[one for group in groups for one in group]]
    norms = [
        torch.nn.utils.clip_grad_norm_(
            group, max_norm, wanted.norm_type, wanted.error_if_nonfinite
        )
        for group, max_norm in zip(groups, wanted.max_norms, strict=True)
    ]
    return torch.stack(norms) if wanted.per_group else norms[0]


def _clip_unscaled(scaler: Any, optimizer: Any, wanted: Clip) -> Any:
    """Clip gradients that were unscaled already."""
    if scaler._plan(optimizer) is None:
        return clip_without_scale(optimizer, wanted)
    if not wanted.per_group:
        return _over_ranks(scaler, optimizer, wanted)
    norms = [
        _over_ranks(
            scaler,
            _OneGroup(group),
            wanted._replace(max_norms=(max_norm,), per_group=False),
        )
        for group, max_norm in zip(
            optimizer.param_groups, wanted.max_norms, strict=True
        )
    ]
    return torch.stack(norms)


class _OneGroup:
    """One parameter group, in the place of an optimizer."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.param_groups = [group]


def _over_ranks(scaler: Any, optimizer: Any, wanted: Clip) -> Any:
    """Clip unscaled gradients by the norm of all that is spread over ranks."""
    known, gradients = scaler._gradients(optimizer)
    plan = scaler._plan(optimizer)
    if plan is None or (known is not None and known.foreign):
        return clip_without_scale(optimizer, wanted)
    if not wanted.in_one_read:
        message = (
            f"norm_type={wanted.norm_type:g} cannot be measured over several ranks. "
            "Use 2.0 or math.inf."
        )
        raise SettingError(message)
    (max_norm,) = wanted.max_norms
    one = torch.ones((), dtype=torch.float32, device=scaler._scale.device)
    request = Request(
        max_norm=max_norm, norm_type=wanted.norm_type, with_norm=True, headroom=False
    )
    buffer, _ = scaler._measure(plan, known, gradients, (one, None), request)
    _raise_if_nonfinite(buffer[NORM], wanted)
    if known is not None:
        known.multiply_(gradients, buffer)
    return buffer[NORM]


def _raise_if_nonfinite(norm: Any, wanted: Clip) -> None:
    """Raise as torch does, if the caller asked for it; that waits for the device."""
    if wanted.error_if_nonfinite and not math.isfinite(norm.item()):
        message = (
            f"The total norm of order {wanted.norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To skip the step "
            "instead, leave error_if_nonfinite out."
        )
        raise RuntimeError(message)


def _in_one_read(
    scaler: Any, optimizer: Any, state: dict[str, Any], wanted: Clip
) -> Any:
    """Return the norm of scaled gradients that are now clipped; `None` if not so."""
    gathered = known, gradients = scaler._gradients(optimizer)
    if known is not None and known.foreign:
        return None
    takes_divisor = handover.takes_scale(optimizer) and not wanted.write_back
    takes_divisor = takes_divisor and not handover.takes_scaler(optimizer)
    request = Request(
        max_norm=wanted.max_norms[0],
        norm_type=wanted.norm_type,
        with_norm=True,
        in_optimizer=takes_divisor,
    )
    found = scaler._look(
        optimizer,
        request,
        allow_fp16=scaler._allow_fp16 or takes_divisor,
        gathered=gathered,
    )
    facts = scaler._iteration.of(state)
    buffer = facts.part.verdict.buffer
    _raise_if_nonfinite(buffer[NORM], wanted)
    state["found_inf_per_device"] = found
    if takes_divisor:
        facts.divisor = buffer[DIVISOR]
    elif known is not None:
        facts.unscaling = True
        known.multiply_(gradients, buffer)
    facts.clipped = True
    state["stage"] = OptState.UNSCALED
    facts.unscaled = FirstGradient(optimizer)
    facts.losses = scaler._iteration.losses
    facts.unscaling = False
    return buffer[NORM]


def _lift_headroom(
    scaler: Any, state: dict[str, Any], norm: Any, max_norm: float
) -> None:
    """Let a step be applied whose gradients were too large until they were clipped."""
    part = scaler._iteration.of(state).part
    if part is None or not part.verdict.is_within(max_norm):
        return
    verdict = part.verdict
    measured = (norm.detach().max() <= validation.FLOAT32_MAX).to(verdict.found)
    lifted = verdict.too_large * measured.reshape(())
    for flag in state["found_inf_per_device"].values():
        flag.mul_(1.0 - lifted.to(flag.device))
    verdict.found.mul_(1.0 - lifted)
    verdict.too_large.sub_(lifted)
