# SPDX-License-Identifier: Apache-2.0
"""The backend that inspects gradients in the host's memory, with torch's operations.

Nothing is asynchronous here: each result is read, the cheapest operation that answers
the question is chosen, and a summary is a list of Python floats. Small gradients are
first copied to one tensor, because an operation on each of two thousand takes ten times
as long as that copy does.

All functions take dense real tensors of a CPU; some of them may have no element.
"""

import math
from itertools import accumulate
from typing import NamedTuple

import torch

from lossscale.core.validation import FLOAT32_MAX, as_float32
from lossscale.torch.inspection.eager import (
    NARROW,
    amax_per_tensor,
    multiply_,
    norms_of,
)
from lossscale.torch.inspection.request import EPSILON, LIMITS, InspectionRequest
from lossscale.torch.inspection.summary import NOT_MEASURED
from lossscale.torch.torch_internals import flatten, foreach_norm, foreach_unscale_

FLAT_ELEMENTS = 2**18
"""Up to so many elements in all, gradients are copied to one tensor to be read."""

_LOST_TO_UNDERFLOW = 2.0**-45
"""Squares of a float32 norm below this may have lost too much to underflow."""


class HostMeasurement(NamedTuple):
    """A summary's numbers on a CPU, and the largest magnitude of each tensor."""

    numbers: list[float]
    amax_per_tensor: list[float] | None


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
        self.smallest = min(self.smallest_bound, self.smallest_limit)
        """Gradients of a smaller norm are not too large in any way."""
        counts = [grad.numel() for grad in grads]
        dtypes = {grad.dtype for grad in grads}
        self.is_plain = (
            all(counts) and len(dtypes) == 1 and not dtypes.intersection(NARROW)
        )
        """Whether one foreach operation can take all of them."""
        self.is_float32 = self.is_plain and torch.float32 in dtypes
        self.is_small = self.is_float32 and sum(counts) <= FLAT_ELEMENTS
        self.ends = torch.tensor(list(accumulate(counts)), device="cpu")
        """Where each of them ends if all are copied to one tensor."""
        self.factor = torch.ones((), dtype=torch.float32, device="cpu")
        self.ignored_flag = torch.zeros((), dtype=torch.float32, device="cpu")


@torch.no_grad()
def measure(
    grads: list[torch.Tensor],
    scale: float,
    inverse: float,
    request: InspectionRequest,
    layout: HostLayout,
) -> HostMeasurement:
    """Measure gradients.

    The norm is the cheapest read there is. If the norm of all of them is small enough,
    so is every element. If it is not finite, the tensors that are not finite are looked
    up: a sum of squares may be infinite where no element is.

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
        norm, amaxes = _measure_norm(grads, layout)
        is_small = inverse > 0.0 and norm * inverse <= layout.smallest
        if not is_small and not request.compares_with(layout.smallest_bound):
            is_small = inverse > 0.0 and norm * inverse <= layout.smallest_limit
        needs_amaxes = request.measure_amax or (not is_small and amaxes is None)
    if needs_amaxes:
        if math.isinf(norm):  # in float64 it may be finite
            norm = torch.linalg.vector_norm(norms_of(grads)).item()
        norm, amaxes, too_large = _measure_amaxes(grads, norm, inverse, request, layout)
    if request.unscale_in_place:
        _multiply_by_float_(grads, inverse, layout)
    return _summarize(
        scale,
        inverse,
        norm,
        amaxes,
        request,
        too_large=too_large,
        has_amax=needs_amaxes,
    )


@torch.no_grad()
def multiply_by_float_(
    grads: list[torch.Tensor], factor: float, layout: HostLayout
) -> None:
    """Multiply gradients by one float32 number, in place."""
    _multiply_by_float_(grads, factor, layout)


def _multiply_by_float_(
    grads: list[torch.Tensor], factor: float, layout: HostLayout
) -> None:
    if layout.is_float32:
        # Much faster than a product with a Python number. Its check is not needed.
        layout.factor.fill_(factor)
        foreach_unscale_(grads, layout.ignored_flag, layout.factor)
    else:
        multiply_(grads, factor)


def _measure_norm(
    grads: list[torch.Tensor], layout: HostLayout
) -> tuple[float, list[float] | None]:
    """Return the norm of all gradients; in float64 where float32 is not enough.

    If some are not finite, also NaN or infinity for each of them and a finite number
    for each other; else `None`, also if only the norm is infinite.
    """
    if layout.is_small:
        flat = flatten(grads)
        # float32 numbers have finite squares in float64.
        norm: float = torch.linalg.vector_norm(flat, dtype=torch.float64).item()
        return norm, None if math.isfinite(norm) else _find_in_flat(flat, layout)
    if layout.is_plain:
        norms = torch.stack(foreach_norm(grads, 2))
        norm = torch.linalg.vector_norm(norms, dtype=torch.float64).item()
        if not norm < _LOST_TO_UNDERFLOW:
            return norm, None if math.isfinite(norm) else _find(grads, norms)
    if not grads:
        return 0.0, None
    norms = norms_of(grads)
    norm = torch.linalg.vector_norm(norms).item()
    return norm, None if math.isfinite(norm) else _find(grads, norms)


def _find_in_flat(flat: torch.Tensor, layout: HostLayout) -> list[float]:
    """Return NaN or infinity for each tensor that is not finite, else 0."""
    places = (flat - flat).nonzero().squeeze(1)  # inf - inf is NaN, which is not 0
    indices = torch.searchsorted(layout.ends, places, right=True)
    kinds = torch.zeros(len(layout.ends), device="cpu")
    kinds.scatter_reduce_(0, indices, flat[places].abs(), "amax")  # NaN is largest
    listed: list[float] = kinds.tolist()
    return listed


def _find(grads: list[torch.Tensor], norms: torch.Tensor) -> list[float] | None:
    """Return NaN or infinity for each tensor that is not finite, else its norm.

    `None` if there is a tensor whose norm alone is infinite.
    """
    kinds: list[float] = norms.tolist()
    infinite = [index for index, norm in enumerate(kinds) if norm == math.inf]
    if infinite:
        amaxes = amax_per_tensor([grads[index] for index in infinite]).tolist()
        for index, amax in zip(infinite, amaxes, strict=True):
            kinds[index] = amax
        if any(map(math.isfinite, amaxes)):
            return None
    return kinds


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


def _summarize(
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
            grad_scale = scale / clip if clip else math.inf
            factor = clip * inverse
            # Such a norm would clip everything to zero.
            too_large = too_large or not norm <= FLOAT32_MAX
        norm = math.inf if norm > FLOAT32_MAX else norm
    too_large = finite and too_large
    if request.as_grad_scale:
        grad_scale = _to_float32(grad_scale)
        finite = finite and (too_large or grad_scale <= FLOAT32_MAX)
    found_inf = 1.0 if too_large or not finite else 0.0
    numbers = [found_inf, 1.0 if nan else 0.0, amax, norm, grad_scale, factor]
    numbers += [scale, clip, 1.0 if too_large else 0.0, NOT_MEASURED]
    return HostMeasurement(numbers, amaxes)


def _shown(amax: float, inverse: float, limit: float) -> float:
    """Return a magnitude as a summary has it: infinite if it cannot be unscaled."""
    usable = math.isnan(amax) or (inverse > 0.0 and amax * inverse <= limit)
    return min(amax, FLOAT32_MAX) if usable else math.inf  # NaN stays NaN


def invert(scale: float) -> float:
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
