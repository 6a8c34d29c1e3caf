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

from lossscale.core.checks import FLOAT32_MAX, as_float32
from lossscale.core.headroom import LARGEST
from lossscale.torch.verdict import AMAX, HEADER, NORM, NOT_MEASURED, SCALE

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
    norm_type: float = 2.0
    """2 or infinity."""
    with_norm: bool = False
    """Measure the norm even if nothing is clipped to it."""
    with_amax: bool = False
    """Measure the largest magnitude of each tensor even if all of them are finite."""
    in_optimizer: bool = False
    """The optimizer divides by what comes out; it must be a float32 number."""

    @property
    def wants_norm(self) -> bool:
        """Whether anybody looks at the norm."""
        return self.with_norm or self.max_norm < math.inf


@torch.no_grad()
def measure(gradients: list[Any], scale: Any, inverse: Any, request: Request) -> Any:
    """Return the buffer of a verdict; see `verdict.py`.

    Args:
        gradients: Dense real tensors of one device, as they came.
        scale: The scale that they carry: one float32 number, on that device.
        inverse: Its inverse, the same.
        request: What is wanted.
    """
    if scale.device.type == "cpu":
        return _measure_on_host(gradients, scale, inverse, request)
    return _measure_on_device(gradients, scale, inverse, request)


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
    agreed: tuple[Any, Any, Any, Any] | None = None,
) -> Any:
    """Return the verdict on all gradients from verdicts on parts of them.

    The parts were measured without clipping: it is the norm of all that is clipped.

    Args:
        buffers: The verdicts on the parts.
        device: Where to put the result.
        request: What is wanted.
        agreed: What all ranks go by instead: whether to skip, whether there is a NaN,
            the largest magnitude, and the norm, which may be `None` for that of here.
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
    finite, nan, amax = largest[0] == 0, largest[1], largest[AMAX]
    if agreed is not None:
        bad, nan, amax, everywhere = agreed
        finite = bad == 0
        norm = norm if everywhere is None else everywhere
    return _on_device(finite, nan, amax, norm, scale, 1.0 / scale, request, tops)


def nothing(scale: Any, inverse: Any) -> Any:
    """Return the buffer of a verdict on no gradients at all."""
    known = inverse if scale is None else scale
    carried = known if scale is not None else 1 / known
    one = torch.ones_like(carried)
    zero = 0 * one
    return torch.stack([zero] * 4 + [carried, 1 / carried, carried, one])


def flag_buffer(flag: Any, scale: Any) -> Any:
    """Return the buffer of a verdict that says no more than a flag."""
    one = torch.ones_like(flag)
    there = scale.to(flag.device)
    numbers = [(flag != 0).to(one.dtype), 0 * one, -one, -one]
    return torch.stack([*numbers, there, 1 / there, there, one])


def _measure_on_host(
    gradients: list[Any], scale: Any, inverse: Any, request: Request
) -> Any:
    """Return a verdict on gradients that the host can look at."""
    times = float(inverse)
    write, norm, tops = request.write, NOT_MEASURED, None
    if 0.0 < times <= 1.0 and not (request.wants_norm or request.with_amax):
        # Unscaling makes no number larger: a look at what came is enough. What is
        # infinite or NaN stays so, and is searched for only if there is any.
        done = times if write else 1.0
        if not _quickly_finite(gradients, inverse, write=write):
            tops = [top / done for top in _tops(gradients).tolist()]
        write = False
    elif request.wants_norm and request.norm_type != math.inf:
        norm = _euclid(gradients)
        smallest = min(LIMITS[dtype] for dtype in {g.dtype for g in gradients})
        if request.with_amax or not (times > 0.0 and norm * times <= smallest):
            tops = _tops(gradients).tolist()
    else:
        tops = _tops(gradients).tolist()
        norm = max(tops, key=_nan_on_top) if request.wants_norm else NOT_MEASURED
    if tops is not None:
        tops = [
            _shown(top, times, LIMITS[gradient.dtype])
            for top, gradient in zip(tops, gradients, strict=True)
        ]
    if write:
        multiply_(gradients, inverse)
    return _on_host(float(scale), times, norm, tops, request)


def _quickly_finite(gradients: list[Any], inverse: Any, *, write: bool) -> bool:
    """Return whether gradients are finite; unscale them on the way if asked to.

    torch's operation reads and writes. For many small tensors it is by far the
    quickest even where nothing needs to be written: it multiplies them by 1.
    """
    found = torch.zeros((), dtype=torch.float32)
    small = gradients
    if not write:
        inverse = torch.ones((), dtype=torch.float32)
        small = [g for g in gradients if g.numel() < _LARGE and g.is_contiguous()]
        large = [g for g in gradients if g.numel() >= _LARGE or not g.is_contiguous()]
        if large and not torch.isfinite(_tops(large)).all():
            return False
    for same in _by_dtype(small):
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, inverse)
    return not found


_LARGE = 2**20
"""From so many numbers on a read costs less than a read and a write."""


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
        finite = finite and norm <= FLOAT32_MAX
    if request.in_optimizer:
        finite = finite and divisor <= FLOAT32_MAX
    header = [float(not finite), float(nan), amax, norm]
    header += [divisor, clip * times, carried, clip]
    return torch.tensor(header + each, dtype=torch.float32)


def _measure_on_device(
    gradients: list[Any], scale: Any, inverse: Any, request: Request
) -> Any:
    """Return a verdict without waiting for the device."""
    wide = _wide(scale.device)
    tops = _tops(gradients).to(wide)
    highest = torch.finfo(wide).max
    # Made there: a copy from the host is nothing that a graph could capture.
    limits = torch.stack(
        [
            torch.full((), min(highest, LIMITS[g.dtype]), dtype=wide, device=g.device)
            for g in gradients
        ]
    )
    times = inverse.to(wide)
    usable = tops.isnan() | ((tops * times <= limits) & (times > 0.0))
    tops = torch.where(usable, tops, math.inf)
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
    return _on_device(finite, nan, amax, norm, carried, times, request, tops)


def _on_device(
    finite: Any,
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
        finite = finite & (norm <= FLOAT32_MAX)
    if request.in_optimizer:
        finite = finite & (scale / clip <= FLOAT32_MAX)
    found = torch.where(finite, 0.0, 1.0)
    header = [found, nan, _narrowed(amax), norm, scale / clip, clip * inverse]
    numbers = [number.to(torch.float32) for number in (*header, scale, clip)]
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
