# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm, in the same read as the check.

An optimizer that takes `grad_scale` is handed one divisor for scale and clipping, and
no gradient is written; for others the gradients are multiplied once. Where others have
a say in how gradients are looked at, or where they are unscaled already, torch's own
function clips them.
"""

import math
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from lossscale.core import checks
from lossscale.core.errors import SettingError
from lossscale.torch import handover
from lossscale.torch.eager import Request
from lossscale.torch.gradients import collected, parameters
from lossscale.torch.verdict import DIVISOR, NORM

_LOOKS = ("_unscale_grads_", "unscale_", "_check_inf_per_device")
"""Who overrides one of these wants every look at gradients to go through it."""


def checked(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Return what to clip to and by which norm, or raise."""
    if max_norm != math.inf:  # which measures, and clips nothing
        max_norm = checks.number("max_norm", max_norm, "a positive number")
    if max_norm <= 0.0:
        message = f"max_norm must be a positive number, got {max_norm!r}."
        raise SettingError(message)
    if norm_type not in (2, math.inf):
        message = (
            f"norm_type must be 2 or infinity, got {norm_type!r}. For another norm "
            "call unscale_(optimizer), then torch.nn.utils.clip_grad_norm_."
        )
        raise SettingError(message)
    return max_norm, float(norm_type)


def clip(scaler: Any, optimizer: Any, max_norm: float, norm_type: float) -> Any:
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
            return torch.zeros((), device=scaler._scale.device)
        alone = not any(map(scaler._overrides, _LOOKS))
        if alone and not has_sum:
            norm = _in_one_read(scaler, optimizer, state, max_norm, norm_type)
            if norm is not None:
                return norm
        scaler.unscale_(optimizer)
    plan = scaler._plan(optimizer)
    if plan is not None:
        return _over_ranks(scaler, optimizer, plan, max_norm, norm_type)
    return unscaled(optimizer, max_norm, norm_type)


def nothing_to_clip(scaler: Any, optimizer: Any) -> bool:
    """Whether there is no gradient, here or on a rank that waits for this one.

    Then nothing counts as unscaled: the gradients may come later.
    """
    if collected(optimizer) or any(map(scaler._overrides, _LOOKS)):
        return False
    return scaler._plan(optimizer) is None


def unscaled(optimizer: Any, max_norm: float, norm_type: float) -> Any:
    """Clip gradients that carry no scale, by torch's function.

    The caller may have changed them since they were looked at: they are measured anew
    and, as everywhere in torch, not checked again.
    """
    return torch.nn.utils.clip_grad_norm_(parameters(optimizer), max_norm, norm_type)


def _over_ranks(
    scaler: Any, optimizer: Any, plan: Any, max_norm: float, norm_type: float
) -> Any:
    """Clip unscaled gradients by the norm of all that is spread over ranks."""
    known, gradients = scaler._gradients(optimizer)
    if known is not None and known.foreign:
        return unscaled(optimizer, max_norm, norm_type)
    one = torch.ones((), dtype=torch.float32, device=scaler._scale.device)
    request = Request(max_norm=max_norm, norm_type=norm_type, with_norm=True)
    buffer, _ = scaler._measure(plan, known, gradients, (one, None), request)
    if known is not None:
        known.multiply_(gradients, buffer)
    return buffer[NORM]


def _in_one_read(
    scaler: Any,
    optimizer: Any,
    state: dict[str, Any],
    max_norm: float,
    norm_type: float,
) -> Any:
    """Return the norm of scaled gradients that are now clipped; `None` if not so."""
    gathered = known, gradients = scaler._gradients(optimizer)
    if known is not None and known.foreign:
        return None
    takes_divisor = handover.takes_scale(optimizer)
    takes_divisor = takes_divisor and not handover.takes_scaler(optimizer)
    request = Request(
        max_norm=max_norm,
        norm_type=norm_type,
        with_norm=True,
        in_optimizer=takes_divisor,
    )
    state["found_inf_per_device"] = scaler._look(
        optimizer,
        request,
        allow_fp16=scaler._allow_fp16 or takes_divisor,
        gathered=gathered,
    )
    facts = scaler._iteration.of(state)
    buffer = facts.part.verdict.buffer
    if takes_divisor:
        facts.divisor = buffer[DIVISOR]
    elif known is not None:
        known.multiply_(gradients, buffer)
    facts.clipped = True
    state["stage"] = OptState.UNSCALED
    return buffer[NORM]
