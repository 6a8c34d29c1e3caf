# SPDX-License-Identifier: Apache-2.0
"""The backend that inspects gradients on a device with torch's own operations.

It is also the oracle of the kernels. Nothing may be read back, so every decision is a
tensor. All functions take dense real tensors of one device; some of them may have no
element. For a CPU there is `host.py`.
"""

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import torch

from lossscale.core.validation import FLOAT32_MAX
from lossscale.torch.inspection.request import EPSILON, LIMITS, InspectionRequest
from lossscale.torch.inspection.summary import (
    AMAX,
    FOUND_INF,
    HEADER,
    NAN,
    NORM,
    NOT_MEASURED,
    SCALE,
    TOO_LARGE,
)
from lossscale.torch.torch_internals import foreach_mul_

NARROW = (torch.float16, torch.bfloat16)
"""dtypes to which torch rounds a Python number before it multiplies by it."""


class Totals(NamedTuple):
    """What the gradients of all groups, or of all ranks, amount to."""

    finite: torch.Tensor
    too_large: torch.Tensor
    nan: torch.Tensor
    amax: torch.Tensor
    norm: torch.Tensor | None
    """`None` for the norm of this rank's gradients."""


@torch.no_grad()
def measure_on_device(
    grads: list[torch.Tensor],
    scale: torch.Tensor,
    inverse: torch.Tensor,
    request: InspectionRequest,
    bounds: list[float],
) -> torch.Tensor:
    """Return the buffer of a summary, without waiting for the device.

    Args:
        grads: The gradients.
        scale: Their scale: one float32 number, on that device.
        inverse: Its inverse, likewise.
        request: What to measure.
        bounds: What each of them may be once unscaled; see `headroom.py`.
    """
    dtype = _accumulation_dtype(scale.device)
    amaxes = amax_per_tensor(grads).to(dtype)
    largest = torch.finfo(dtype).max

    def make_tensor(numbers: list[float]) -> torch.Tensor:
        # Filled on the device: a graph cannot capture a copy from the host.
        return torch.stack(
            [
                torch.full((), min(largest, number), dtype=dtype, device=scale.device)
                for number in numbers
            ]
        )

    limits = make_tensor([LIMITS[grad.dtype] for grad in grads])
    times = inverse.to(dtype)
    usable = amaxes.isnan() | ((amaxes * times <= limits) & (times > 0.0))
    amaxes = torch.where(usable, amaxes, math.inf)
    too_large = torch.zeros((), dtype=torch.bool, device=scale.device)
    if request.compares_with(min(bounds)):
        too_large = (amaxes * times > make_tensor(bounds)).any()
    norm = torch.full((), NOT_MEASURED, dtype=dtype, device=scale.device)
    if request.wants_norm:
        is_amax = request.norm_type == math.inf
        scaled = amaxes.amax() if is_amax else norms_of(grads).square().sum().sqrt()
        norm = scaled * times
    totals = Totals(
        finite=(amaxes < math.inf).all(),
        too_large=too_large,
        nan=amaxes.isnan().any().to(dtype),
        amax=torch.where(amaxes < math.inf, amaxes, 0.0).amax(),
        norm=norm,
    )
    if request.unscale_in_place:
        multiply_(grads, inverse)
    return _summarize_on_device(totals, norm, scale.to(dtype), times, request, amaxes)


def combine(
    buffers: list[torch.Tensor],
    device: torch.device,
    request: InspectionRequest,
    totals: Totals | None = None,
) -> torch.Tensor:
    """Return the buffer of the summary of all gradients from those of its groups.

    The groups were measured without clipping: it is the norm of all that is clipped.

    Args:
        buffers: The buffers of the groups.
        device: The device of the result.
        request: What to measure.
        totals: What all ranks have found instead, if there are several.
    """
    dtype = _accumulation_dtype(device)
    headers = torch.stack([buffer[:HEADER].to(device) for buffer in buffers])
    largest = headers.amax(0)  # NaN is largest
    norms = headers[:, NORM]
    if request.norm_type == math.inf:
        norm = largest[NORM].to(dtype)
    else:
        norm = norms.to(dtype).square().sum().sqrt()
    norm = torch.where((norms == NOT_MEASURED).any(), NOT_MEASURED, norm)
    if totals is None:
        totals = Totals(
            finite=(headers[:, FOUND_INF] <= headers[:, TOO_LARGE]).all(),
            too_large=largest[TOO_LARGE] != 0,
            nan=largest[NAN],
            amax=largest[AMAX],
            norm=None,
        )
    if totals.norm is not None:
        norm = totals.norm
    amaxes = torch.cat([buffer[HEADER:].to(device) for buffer in buffers])
    scale = headers[0, SCALE].to(dtype)
    return _summarize_on_device(totals, norm, scale, 1.0 / scale, request, amaxes)


def _summarize_on_device(
    totals: Totals,
    norm: torch.Tensor,
    scale: torch.Tensor,
    inverse: torch.Tensor,
    request: InspectionRequest,
    amaxes: torch.Tensor,
) -> torch.Tensor:
    """Return the buffer of a summary; `norm` is unscaled."""
    finite, too_large = totals.finite, totals.too_large
    clip = torch.ones_like(scale)
    if request.max_norm < math.inf:
        clip = request.max_norm / (norm + EPSILON)
        clip = torch.where(clip < 1.0, clip, 1.0)
        # Such a norm would clip everything to zero.
        too_large = too_large | ~(norm <= FLOAT32_MAX)
    too_large = finite & too_large
    if request.as_grad_scale:
        finite = finite & (too_large | (scale / clip <= FLOAT32_MAX))
    found_inf = torch.where(finite & ~too_large, 0.0, 1.0)
    header = [
        found_inf,
        totals.nan,
        _narrow(totals.amax),
        norm,
        scale / clip,
        clip * inverse,
        scale,
        clip,
        too_large,
        torch.full_like(scale, NOT_MEASURED),
    ]
    numbers = torch.stack([number.to(torch.float32) for number in header])
    return torch.cat([numbers, _narrow(amaxes)])


def _narrow(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in float32; a finite one beyond it does not become infinity."""
    is_beyond = (numbers > FLOAT32_MAX) & (numbers < math.inf)
    return torch.where(is_beyond, FLOAT32_MAX, numbers).to(torch.float32)


# -- on any device ---------------------------------------------------------------------


@torch.no_grad()
def multiply_(grads: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors by one float32 number, in place.

    torch computes the product of float16 elements and such a number in float32, and
    rounds it once.
    """
    for group in _by_dtype(grads):
        number = factor
        if isinstance(factor, float) and group[0].dtype in NARROW:
            # torch would round a Python number to float16 before it multiplies.
            number = torch.full((), factor, dtype=torch.float32, device="cpu")
        foreach_mul_(group, number)


def amax_per_tensor(grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each tensor; NaN is larger than any."""
    if grads[0].device.type == "cpu":
        # Three times as fast there as the norm of infinite order.
        ends = [
            torch.aminmax(grad) if grad.numel() else (grad.sum(), grad.sum())
            for grad in grads
        ]
        if len(set(map(_dtype, grads))) == 1:
            low, high = (torch.stack(end) for end in zip(*ends, strict=True))
            return torch.maximum(-low, high).to(torch.float64)
        amaxes = [torch.maximum(-low, high) for low, high in ends]
    else:
        amaxes = [
            torch.linalg.vector_norm(grad, math.inf) if grad.numel() else grad.sum()
            for grad in grads
        ]
    dtype = _accumulation_dtype(grads[0].device)
    return torch.stack([amax.to(dtype) for amax in amaxes])


def norms_of(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each tensor, in the widest dtype of its device."""
    return torch.stack(
        [
            torch.linalg.vector_norm(grad, dtype=_accumulation_dtype(grad.device))
            for grad in grads
        ]
    )


_dtype = attrgetter("dtype")


def _by_dtype(grads: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Return lists of the tensors that have elements, each of one dtype."""
    if len(set(map(_dtype, grads))) == 1 and all(map(torch.Tensor.numel, grads)):
        return [grads]
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            groups.setdefault(grad.dtype, []).append(grad)
    return groups.values()


def _accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums and decisions are made on a device."""
    return torch.float32 if device.type == "mps" else torch.float64
