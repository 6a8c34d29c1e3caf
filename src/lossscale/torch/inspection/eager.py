# SPDX-License-Identifier: Apache-2.0
"""The backend that inspects gradients with torch's own operations, on any device.

It is also the oracle of the kernels. On a CPU nothing is asynchronous: the host reads
each result and chooses the cheapest operation, and a summary is a list of Python
floats. On other devices nothing may be read back, so every decision is a tensor.

All functions take dense real tensors of one device; some of them may have no element.
"""

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import torch

from lossscale.core.validation import FLOAT32_MAX, as_float32
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
from lossscale.torch.torch_internals import foreach_mul_, foreach_norm


class HostMeasurement(NamedTuple):
    """A summary's numbers on a CPU, and the largest magnitude of each tensor."""

    numbers: list[float]
    amax_per_tensor: list[float] | None


class Agreement(NamedTuple):
    """What all ranks have found, in place of what this rank has."""

    finite: torch.Tensor
    too_large: torch.Tensor
    nan: torch.Tensor
    amax: torch.Tensor
    norm: torch.Tensor | None
    """`None` for the norm of this rank's gradients."""


# -- on a CPU --------------------------------------------------------------------------


class HostLayout:
    """What a list of gradients in the host's memory has in common at every step.

    Reading an attribute of each of two thousand tensors costs a tenth of a millisecond;
    as long as their layout stays, these are the answers.
    """

    def __init__(self, grads: list[torch.Tensor], bounds: list[float]) -> None:
        """Read the dtypes and sizes.

        Args:
            grads: The gradients.
            bounds: What each of them may be once unscaled; see `headroom.py`.
        """
        self.bounds = bounds
        self.limits = [LIMITS[grad.dtype] for grad in grads]
        self.smallest_bound = min(bounds, default=math.inf)
        self.smallest_limit = min(self.limits, default=math.inf)
        has_elements = all(grad.numel() for grad in grads)
        self.is_narrow = any(grad.dtype in _NARROW for grad in grads)
        self.is_plain = (
            bool(grads)
            and has_elements
            and not self.is_narrow
            and len({grad.dtype for grad in grads}) == 1
        )
        """Whether one foreach operation can take all of them."""


@torch.no_grad()
def measure_on_host(
    grads: list[torch.Tensor],
    scale: float,
    inverse: float,
    request: InspectionRequest,
    layout: HostLayout,
) -> HostMeasurement:
    """Measure gradients that are in the host's memory.

    The norm of each tensor is the cheapest read there is. If the norm of all of them is
    small enough, so is every element. If it is not finite, the tensors whose norm is
    not finite are read again: a sum of squares may be infinite where no element is.

    Args:
        grads: The gradients.
        scale: The scale that they carry.
        inverse: Its inverse, a float32 number.
        request: What to measure.
        layout: Their layout.
    """
    norm, amaxes, too_large = NOT_MEASURED, None, False
    needs_amaxes = True
    if request.norm_type != math.inf:
        norm, norms = _norms_on_host(grads, layout)
        smallest = layout.smallest_limit
        if request.compares_with(layout.smallest_bound):
            smallest = min(smallest, layout.smallest_bound)
        needs_amaxes = request.measure_amax or not (
            inverse > 0.0 and norm * inverse <= smallest
        )
        if needs_amaxes and not request.measure_amax and not math.isfinite(norm):
            amaxes = _find_nonfinite(grads, norms)
            needs_amaxes = amaxes is None
    if needs_amaxes:
        if math.isinf(norm):  # in float64 it may be finite
            norm = torch.linalg.vector_norm(_norms(grads)).item()
        norm, amaxes, too_large = _measure_amaxes(grads, norm, inverse, request, layout)
    if request.unscale_in_place:
        multiply_on_host_(grads, inverse, layout)
    has_amax = needs_amaxes and amaxes is not None
    return _summarize_on_host(
        scale, inverse, norm, amaxes, request, too_large=too_large, has_amax=has_amax
    )


@torch.no_grad()
def multiply_on_host_(
    grads: list[torch.Tensor], factor: float, layout: HostLayout
) -> None:
    """Multiply gradients in the host's memory by one float32 number, in place."""
    if layout.is_plain:
        foreach_mul_(grads, factor)
    else:
        multiply_(grads, factor)


def _find_nonfinite(
    grads: list[torch.Tensor], norms: torch.Tensor
) -> list[float] | None:
    """Return NaN or infinity for each tensor that is not finite, else its norm.

    `None` if there is a tensor whose norm alone is infinite.
    """
    found: list[float] = norms.tolist()
    infinite = [index for index, norm in enumerate(found) if norm == math.inf]
    if infinite:
        amaxes = amax_per_tensor([grads[index] for index in infinite]).tolist()
        for index, amax in zip(infinite, amaxes, strict=True):
            found[index] = amax
        if any(map(math.isfinite, amaxes)):
            return None
    return found


def _measure_amaxes(
    grads: list[torch.Tensor],
    norm: float,
    inverse: float,
    request: InspectionRequest,
    layout: HostLayout,
) -> tuple[float, list[float], bool]:
    """Return the norm, the largest magnitudes, and whether one of them is too large."""
    amaxes: list[float] = amax_per_tensor(grads).tolist()
    if request.norm_type == math.inf:
        norm = max(amaxes, key=_nan_last)
    too_large = False
    if request.compares_with(layout.smallest_bound):
        pairs = zip(amaxes, layout.bounds, strict=True)
        too_large = any(amax * inverse > bound for amax, bound in pairs)
    pairs = zip(amaxes, layout.limits, strict=True)
    return norm, [_shown(amax, inverse, limit) for amax, limit in pairs], too_large


def _summarize_on_host(
    scale: float,
    inverse: float,
    norm: float,
    amaxes: list[float] | None,
    request: InspectionRequest,
    *,
    too_large: bool,
    has_amax: bool,
) -> HostMeasurement:
    """Return the numbers of a summary; `norm` is still scaled."""
    finite, nan, amax = True, False, NOT_MEASURED
    if amaxes is not None:
        finite = all(map(math.isfinite, amaxes))
        nan = any(map(math.isnan, amaxes))
        if has_amax:
            amax = max(filter(math.isfinite, amaxes), default=0.0)
    clip, grad_scale, factor = 1.0, scale, inverse
    if norm != NOT_MEASURED:
        norm = norm / scale if scale else math.inf
        if request.max_norm < math.inf:
            clip = min(1.0, request.max_norm / (norm + EPSILON))  # NaN stays 1
            grad_scale = _to_float32(scale / clip) if clip else math.inf
            factor = clip * inverse
            # Such a norm would clip everything to zero.
            too_large = too_large or not norm <= FLOAT32_MAX
        norm = math.inf if norm > FLOAT32_MAX else norm
    too_large = finite and too_large
    if request.as_grad_scale and not too_large:
        finite = finite and grad_scale <= FLOAT32_MAX
    found_inf = 1.0 if too_large or not finite else 0.0
    numbers = [found_inf, 1.0 if nan else 0.0, amax, norm, grad_scale, factor]
    numbers += [scale, clip, 1.0 if too_large else 0.0, NOT_MEASURED]
    return HostMeasurement(numbers, amaxes)


def _norms_on_host(
    grads: list[torch.Tensor], layout: HostLayout
) -> tuple[float, torch.Tensor]:
    """Return the norm of all gradients and that of each.

    In float64 where float32 is not enough.
    """
    if layout.is_plain:
        norms = torch.stack(foreach_norm(grads, 2))
        total: float = torch.linalg.vector_norm(norms, dtype=torch.float64).item()
        if not total < _LOST_TO_UNDERFLOW:
            return total, norms
    if not grads:
        return 0.0, torch.zeros(0)
    norms = _norms(grads)
    return torch.linalg.vector_norm(norms).item(), norms


_NARROW = (torch.float16, torch.bfloat16)

_LOST_TO_UNDERFLOW = 2.0**-45
"""Squares of a float32 norm below this may have lost too much to underflow."""


def _shown(amax: float, inverse: float, limit: float) -> float:
    """Return a magnitude as a summary has it: infinite if it cannot be unscaled."""
    usable = math.isnan(amax) or (inverse > 0.0 and amax * inverse <= limit)
    return min(amax, FLOAT32_MAX) if usable else math.inf  # NaN stays NaN


def invert_on_host(scale: float) -> float:
    """Return 1 / scale, divided in float64 and rounded to float32."""
    if scale == 0.0:
        return math.inf
    inverse = 1.0 / scale
    if abs(inverse) <= FLOAT32_MAX or math.isnan(inverse):
        return as_float32(inverse)
    return math.copysign(math.inf, inverse)


def _to_float32(number: float) -> float:
    """Return a number rounded to float32; infinity if it is beyond, or NaN."""
    return as_float32(number) if number <= FLOAT32_MAX else math.inf


def _nan_last(number: float) -> tuple[bool, float]:
    """Return a key that sorts magnitudes as torch's maximum does: NaN is largest."""
    return math.isnan(number), number


# -- on a device -----------------------------------------------------------------------


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
        scale: The scale that they carry: one float32 number, on that device.
        inverse: Its inverse, likewise.
        request: What to measure.
        bounds: What each of them may be once unscaled; see `headroom.py`.
    """
    wide = _wide_dtype(scale.device)
    amaxes = amax_per_tensor(grads).to(wide)
    largest = torch.finfo(wide).max

    def make_tensor(numbers: list[float]) -> torch.Tensor:
        # Filled on the device: a graph cannot capture a copy from the host.
        return torch.stack(
            [
                torch.full((), min(largest, number), dtype=wide, device=scale.device)
                for number in numbers
            ]
        )

    limits = make_tensor([LIMITS[grad.dtype] for grad in grads])
    times = inverse.to(wide)
    usable = amaxes.isnan() | ((amaxes * times <= limits) & (times > 0.0))
    amaxes = torch.where(usable, amaxes, math.inf)
    too_large = torch.zeros((), dtype=torch.bool, device=scale.device)
    if request.compares_with(min(bounds)):
        too_large = (amaxes * times > make_tensor(bounds)).any()
    norm = torch.full((), NOT_MEASURED, dtype=wide, device=scale.device)
    if request.wants_norm:
        is_amax = request.norm_type == math.inf
        scaled = amaxes.amax() if is_amax else _norms(grads).square().sum().sqrt()
        norm = scaled * times
    agreement = Agreement(
        finite=(amaxes < math.inf).all(),
        too_large=too_large,
        nan=amaxes.isnan().any().to(wide),
        amax=torch.where(amaxes < math.inf, amaxes, 0.0).amax(),
        norm=norm,
    )
    if request.unscale_in_place:
        multiply_(grads, inverse)
    return _summarize_on_device(agreement, norm, scale.to(wide), times, request, amaxes)


def combine(
    buffers: list[torch.Tensor],
    device: torch.device,
    request: InspectionRequest,
    agreement: Agreement | None = None,
) -> torch.Tensor:
    """Return the buffer of the summary of all gradients from those of its parts.

    The parts were measured without clipping: it is the norm of all that is clipped.

    Args:
        buffers: The buffers of the parts.
        device: The device of the result.
        request: What to measure.
        agreement: What all ranks have found instead, if there are several.
    """
    wide = _wide_dtype(device)
    headers = torch.stack([buffer[:HEADER].to(device) for buffer in buffers])
    largest = headers.amax(0)  # NaN is largest
    norms = headers[:, NORM]
    if request.norm_type == math.inf:
        norm = largest[NORM].to(wide)
    else:
        norm = norms.to(wide).square().sum().sqrt()
    norm = torch.where((norms == NOT_MEASURED).any(), NOT_MEASURED, norm)
    if agreement is None:
        agreement = Agreement(
            finite=(headers[:, FOUND_INF] <= headers[:, TOO_LARGE]).all(),
            too_large=largest[TOO_LARGE] != 0,
            nan=largest[NAN],
            amax=largest[AMAX],
            norm=None,
        )
    if agreement.norm is not None:
        norm = agreement.norm
    amaxes = torch.cat([buffer[HEADER:].to(device) for buffer in buffers])
    scale = headers[0, SCALE].to(wide)
    return _summarize_on_device(agreement, norm, scale, 1.0 / scale, request, amaxes)


def _summarize_on_device(
    found: Agreement,
    norm: torch.Tensor,
    scale: torch.Tensor,
    inverse: torch.Tensor,
    request: InspectionRequest,
    amaxes: torch.Tensor,
) -> torch.Tensor:
    """Return the buffer of a summary; `norm` is unscaled."""
    finite, too_large = found.finite, found.too_large
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
        found.nan,
        _narrow(found.amax),
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


# -- on either -------------------------------------------------------------------------


@torch.no_grad()
def multiply_(grads: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors by one float32 number, in place.

    torch computes the product of float16 elements and such a number in float32, and
    rounds it once.
    """
    for group in _by_dtype(grads):
        number = factor
        if isinstance(factor, float) and group[0].dtype in _NARROW:
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
    wide = _wide_dtype(grads[0].device)
    return torch.stack([amax.to(wide) for amax in amaxes])


def _norms(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each tensor, in the widest dtype of its device."""
    return torch.stack(
        [
            torch.linalg.vector_norm(grad, dtype=_wide_dtype(grad.device))
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


def _wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums and decisions are made on a device."""
    return torch.float32 if device.type == "mps" else torch.float64
