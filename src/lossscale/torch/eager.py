# SPDX-License-Identifier: Apache-2.0
"""Verdicts by torch's own operations: any device, and the oracle of the kernels.

On a CPU nothing is asynchronous, so the host looks first and takes the cheapest of
torch's operations: gradients are read once, or read and written once where they must be
unscaled. On other devices nothing may be read back, and every decision is a tensor.

All functions take dense real tensors of one device, some of which may hold no number.
"""

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from lossscale.core.headroom import LARGEST
from lossscale.core.validation import FLOAT32_MAX, as_float32
from lossscale.torch.verdict import (
    AMAX,
    FOUND,
    HEADER,
    NAN,
    NORM,
    NOT_MEASURED,
    SCALE,
    TOO_LARGE,
)

LIMITS = {getattr(torch, name): largest for name, largest in LARGEST.items()}
"""The largest number of each dtype that a gradient may have."""

EPSILON = 1e-6
"""What torch adds to a norm before it divides by it."""


class Request(NamedTuple):
    """What is to be found out about gradients, and done to them."""

    write: bool = False
    """Multiply them by the inverse of the scale, in place; not together with clipping.
    """
    max_norm: float = math.inf
    """What their norm is to be clipped to; infinity for no clipping."""
    clipped_later: float = math.inf
    """What their norm will be clipped to when that of all parts is known."""
    norm_type: float = 2.0
    """2 or infinity."""
    with_norm: bool = False
    """Measure the norm even if nothing is clipped to it."""
    with_amax: bool = False
    """Measure the largest magnitude of each tensor even if all of them are finite."""
    in_optimizer: bool = False
    """The optimizer divides by what comes out; it must be a float32 number."""
    headroom: bool = True
    """Compare unscaled gradients with what the optimizer can hold."""

    def checks_headroom(self, bounds: list[float]) -> bool:
        """Whether gradients are to be compared with what the optimizer can hold.

        Clipped to less than that they cannot be too large.
        """
        protected = min(self.max_norm, self.clipped_later) <= min(bounds)
        return self.headroom and not protected

    def without_clipping(self) -> "Request":
        """Return the same request for a part: it takes the norm of all to clip."""
        return self._replace(max_norm=math.inf, clipped_later=self.max_norm)

    @property
    def wants_norm(self) -> bool:
        """Whether anybody looks at the norm."""
        return self.with_norm or self.max_norm < math.inf


@torch.no_grad()
def measure(
    gradients: list[Any],
    scale: Any,
    inverse: Any,
    request: Request,
    bounds: list[float],
) -> Any:
    """Return the buffer of a verdict; see `verdict.py`.

    Args:
        gradients: Dense real tensors of one device, as they came.
        scale: The scale that they carry: one float32 number, on that device.
        inverse: Its inverse, the same.
        request: What is wanted.
        bounds: What each of them may be once unscaled; see `headroom.py`.
    """
    if scale.device.type == "cpu":
        return _measure_on_host(gradients, scale, inverse, request, bounds)
    return _measure_on_device(gradients, scale, inverse, request, bounds)


@torch.no_grad()
def multiply_(gradients: list[Any], factor: Any) -> None:
    """Multiply tensors by one float32 number, in place.

    torch takes the product of float16 numbers and a float32 tensor of no dimension in
    float32, and rounds it once.
    """
    for same in _by_dtype(gradients):
        torch._foreach_mul_(same, factor)


def combine(
    buffers: list[Any],
    device: Any,
    request: Request,
    agreed: tuple[Any, Any, Any, Any, Any] | None = None,
) -> Any:
    """Return the verdict on all gradients from verdicts on parts of them.

    The parts were measured without clipping: it is the norm of all that is clipped.

    Args:
        buffers: The verdicts on the parts.
        device: Where to put the result.
        request: What is wanted.
        agreed: What all ranks go by instead: whether the gradients are finite, whether
            they are too large, whether there is a NaN, the largest magnitude, and the
            norm, which may be `None` for that of here.
    """
    headers = torch.stack([buffer[:HEADER].to(device) for buffer in buffers])
    largest = headers.amax(0)  # NaN is above all
    parts = headers[:, NORM]
    if request.norm_type == math.inf:
        norm = largest[NORM].to(_wide(device))
    else:
        norm = parts.to(_wide(device)).square().sum().sqrt()
    norm = torch.where((parts == NOT_MEASURED).any(), NOT_MEASURED, norm)
    tops = torch.cat([buffer[HEADER:].to(device) for buffer in buffers])
    scale = headers[0, SCALE].to(_wide(device))
    finite = (headers[:, FOUND] <= headers[:, TOO_LARGE]).all()
    too_large, nan, amax = largest[TOO_LARGE] != 0, largest[NAN], largest[AMAX]
    if agreed is not None:
        finite, too_large, nan, amax, everywhere = agreed
        norm = norm if everywhere is None else everywhere
    return _on_device(
        finite, too_large, nan, amax, norm, scale, 1.0 / scale, request, tops
    )


def nothing(scale: Any, inverse: Any) -> Any:
    """Return the buffer of a verdict on no gradients at all."""
    known = inverse if scale is None else scale
    carried = known if scale is not None else 1 / known
    one = torch.ones_like(carried)
    zero = 0 * one
    return torch.stack([zero] * 4 + [carried, 1 / carried, carried, one, zero, -one])


def flag_buffer(flag: Any, scale: Any) -> Any:
    """Return the buffer of a verdict that says no more than a flag."""
    one = torch.ones_like(flag)
    there = scale.to(flag.device)
    numbers = [(flag != 0).to(one.dtype), 0 * one, -one, -one]
    return torch.stack([*numbers, there, 1 / there, there, one, 0 * one, -one])


def _measure_on_host(
    gradients: list[Any],
    scale: Any,
    inverse: Any,
    request: Request,
    bounds: list[float],
) -> Any:
    """Return a verdict on gradients that the host can look at.

    The norm is the cheapest read there is. If it is small enough, so is every number;
    only otherwise each tensor is read again for its largest magnitude.
    """
    times = float(inverse)
    limits = [LIMITS[gradient.dtype] for gradient in gradients]
    checks_headroom = request.checks_headroom(bounds)
    by_size = request.norm_type == math.inf
    norm, tops = NOT_MEASURED, None
    if not by_size:
        norm = _euclid(gradients)
        lowest = min([*limits, *bounds] if checks_headroom else limits)
        is_small = times > 0.0 and norm * times <= lowest
    if by_size or request.with_amax or not is_small:
        tops = _tops(gradients).tolist()
    if by_size and tops is not None:
        norm = max(tops, key=_nan_on_top)
    too_large = False
    if tops is not None:
        if checks_headroom:
            pairs = zip(tops, bounds, strict=True)
            too_large = any(top * times > bound for top, bound in pairs)
        tops = [
            _shown(top, times, limit) for top, limit in zip(tops, limits, strict=True)
        ]
    if request.write:
        multiply_(gradients, inverse)
    return _on_host(float(scale), times, norm, tops, request, too_large=too_large)


def _shown(top: float, times: float, limit: float) -> float:
    """Return a magnitude as a verdict has it: infinite if it cannot be unscaled."""
    usable = math.isnan(top) or (times > 0.0 and top * times <= limit)
    return min(top, FLOAT32_MAX) if usable else math.inf  # NaN stays NaN


def _on_host(
    carried: float,
    times: float,
    norm: float,
    tops: list[float] | None,
    request: Request,
    *,
    too_large: bool,
) -> Any:
    """Return the buffer of a verdict from Python numbers."""
    each = tops or []
    finite = all(map(math.isfinite, each))
    nan = any(map(math.isnan, each))
    amax = max(filter(math.isfinite, each), default=0.0)
    if tops is None:
        amax = NOT_MEASURED
    clip = 1.0
    if norm != NOT_MEASURED:
        norm = norm / carried if carried else math.inf
        clip = min(1.0, request.max_norm / (norm + EPSILON))  # NaN stays 1
    divisor = _as_float32(carried / clip) if clip else math.inf
    if request.max_norm < math.inf:
        # Such a norm would clip everything to zero.
        too_large = too_large or not norm <= FLOAT32_MAX
    too_large = finite and too_large
    if request.in_optimizer and not too_large:
        finite = finite and divisor <= FLOAT32_MAX
    header = [float(too_large or not finite), float(nan), amax, norm]
    header += [divisor, clip * times, carried, clip, float(too_large), NOT_MEASURED]
    return torch.tensor(header + each, dtype=torch.float32, device="cpu")


def _measure_on_device(
    gradients: list[Any],
    scale: Any,
    inverse: Any,
    request: Request,
    bounds: list[float],
) -> Any:
    """Return a verdict without waiting for the device."""
    wide = _wide(scale.device)
    tops = _tops(gradients).to(wide)
    highest = torch.finfo(wide).max

    def listed(numbers: list[float]) -> Any:
        # Made there: a copy from the host is nothing that a graph could capture.
        return torch.stack(
            [
                torch.full((), min(highest, number), dtype=wide, device=scale.device)
                for number in numbers
            ]
        )

    limits = listed([LIMITS[gradient.dtype] for gradient in gradients])
    times = inverse.to(wide)
    usable = tops.isnan() | ((tops * times <= limits) & (times > 0.0))
    tops = torch.where(usable, tops, math.inf)
    too_large = torch.zeros((), dtype=torch.bool, device=scale.device)
    if request.checks_headroom(bounds):
        too_large = (tops * times > listed(bounds)).any()
    norm = torch.full((), NOT_MEASURED, dtype=wide, device=scale.device)
    if request.wants_norm:
        by_size = request.norm_type == math.inf
        norm = (
            tops.amax() if by_size else _norms(gradients).square().sum().sqrt()
        ) * times
    finite = (tops < math.inf).all()
    nan = tops.isnan().any().to(wide)
    amax = torch.where(tops < math.inf, tops, 0.0).amax()
    if request.write:
        multiply_(gradients, inverse)
    carried = scale.to(wide)
    return _on_device(finite, too_large, nan, amax, norm, carried, times, request, tops)


def _on_device(
    finite: Any,
    too_large: Any,
    nan: Any,
    amax: Any,
    norm: Any,
    scale: Any,
    inverse: Any,
    request: Request,
    tops: Any,
) -> Any:
    """Return the buffer of a verdict from tensors."""
    clip = torch.ones_like(scale)
    if request.max_norm < math.inf:
        clip = request.max_norm / (norm + EPSILON)
        clip = torch.where(clip < 1.0, clip, 1.0)
        # Such a norm would clip everything to zero.
        too_large = too_large | ~(norm <= FLOAT32_MAX)
    too_large = finite & too_large
    if request.in_optimizer:
        finite = finite & (too_large | (scale / clip <= FLOAT32_MAX))
    found = torch.where(finite & ~too_large, 0.0, 1.0)
    header = [found, nan, _narrowed(amax), norm, scale / clip, clip * inverse]
    numbers = [number.to(torch.float32) for number in (*header, scale, clip, too_large)]
    numbers.append(torch.full_like(numbers[0], NOT_MEASURED))
    return torch.cat([torch.stack(numbers), _narrowed(tops)])


def _narrowed(numbers: Any) -> Any:
    """Return numbers in float32; a finite one beyond it is no infinity."""
    beyond = (numbers > FLOAT32_MAX) & (numbers < math.inf)
    return torch.where(beyond, FLOAT32_MAX, numbers).to(torch.float32)


def _as_float32(number: float) -> float:
    """Return a number rounded to float32, infinity if it is beyond."""
    return as_float32(number) if number <= FLOAT32_MAX else math.inf


def _nan_on_top(number: float) -> tuple[bool, float]:
    """Return what sorts a magnitude as torch's maximum does."""
    return math.isnan(number), number


def _tops(gradients: list[Any]) -> Any:
    """Return the largest magnitude of each tensor; NaN is above all."""
    if gradients[0].device.type == "cpu":
        # Three times as fast there as the norm of infinite order.
        ends = [
            torch.aminmax(g) if g.numel() else (g.sum(), g.sum()) for g in gradients
        ]
        if len(set(map(_dtype, gradients))) == 1:
            low, high = (torch.stack(end) for end in zip(*ends, strict=True))
            return torch.maximum(-low, high).to(torch.float64)
        each = [torch.maximum(-low, high) for low, high in ends]
    else:
        each = [
            torch.linalg.vector_norm(g, math.inf) if g.numel() else g.sum()
            for g in gradients
        ]
    wide = _wide(gradients[0].device)
    return torch.stack([top.to(wide) for top in each])


def _norms(gradients: Iterable[Any]) -> Any:
    """Return the norm of each tensor, in the widest dtype of its device."""
    return torch.stack(
        [torch.linalg.vector_norm(g, dtype=_wide(g.device)) for g in gradients]
    )


def _euclid(gradients: list[Any]) -> float:
    """Return the norm of all gradients, in float64 where float32 is not enough."""
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return 0.0
    if not any(g.dtype in (torch.float16, torch.bfloat16) for g in gradients):
        quick = torch._foreach_norm(gradients, 2)
        total = sum(norm * norm for norm in torch.stack(quick).tolist())
        if _SMALL < total < math.inf:
            return math.sqrt(total)
    return math.sqrt(sum(norm * norm for norm in _norms(gradients).tolist()))


_SMALL = 2.0**-90
"""Of a sum of squares below this, too much may have vanished in float32."""


_dtype = attrgetter("dtype")


def _by_dtype(gradients: list[Any]) -> Iterable[list[Any]]:
    """Return lists of the tensors that have numbers, each of one dtype."""
    if len(set(map(_dtype, gradients))) == 1 and all(
        map(torch.Tensor.numel, gradients)
    ):
        return [gradients]
    groups: dict[Any, list[Any]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault(gradient.dtype, []).append(gradient)
    return groups.values()


def _wide(device: Any) -> Any:
    """Return the dtype in which sums and decisions are made on a device."""
    return torch.float32 if device.type == "mps" else torch.float64
