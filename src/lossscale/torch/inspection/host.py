# SPDX-License-Identifier: Apache-2.0
"""The backend that inspects gradients in the host's memory, with torch's operations.

Nothing is asynchronous here: each result is read, the cheapest operation that answers
the question is chosen, and a summary is a list of Python floats. Small gradients are
first copied to one tensor, because an operation on each of two thousand takes ten times
as long as that copy does.

All functions take dense real tensors of a CPU; some of them may have no element.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from lossscale.core.validation import FLOAT32_MAX, as_float32
from lossscale.torch.inspection.eager import NARROW, multiply_
from lossscale.torch.inspection.host_norms import measure_amaxes, measure_norm
from lossscale.torch.inspection.request import EPSILON, LIMITS, InspectionRequest
from lossscale.torch.inspection.summary import (
    FOUND_INF,
    NOT_MEASURED,
    GradientSummary,
)
from lossscale.torch.torch_internals import (
    flatten,
    foreach_unscale_,
    set_grad_enabled,
)

if TYPE_CHECKING:
    from lossscale.torch.inspection.groups import FoundInf, GradientScale

FLAT_ELEMENTS = 2**18
"""Up to so many elements in all, gradients are copied to one tensor to be read."""

KEPT_ELEMENTS = 2**14
"""Up to so many, that copy is kept of a step that overflowed, until the report is asked
which tensors did: 64 KiB for each of the reports that a history keeps."""


class HostMeasurement(NamedTuple):
    """A summary's numbers on a CPU, and the largest magnitude of each tensor."""

    numbers: list[float]
    amax_per_tensor: list[float] | None
    unread: Callable[[], list[float]] | None = None
    """Returns the magnitudes, if they were left for later."""


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
        self.is_small = (
            all(counts)
            and dtypes.issubset((torch.float32, *NARROW))
            and sum(counts) <= FLAT_ELEMENTS
        )
        self._rows = _group_by_row(grads) if self.is_small else None
        self._order: list[int] | None = None
        """Which gradient each stretch of the copy is, if their order is another."""
        if self._rows is not None and len(self._rows) > 1:
            self._order = [index for rows in self._rows for index in rows]
            counts = [counts[index] for index in self._order]
        self._ends = torch.tensor(list(accumulate(counts)), device="cpu")
        """Where each stretch ends."""
        self._factor = torch.ones((), dtype=torch.float32, device="cpu")
        self._factor_as_float = 1.0
        self._ignored_flag = torch.zeros((), dtype=torch.float32, device="cpu")

    def read(
        self, grads: list[torch.Tensor], kept_elements: int
    ) -> tuple[float, list[float] | None, Callable[[], list[float]] | None]:
        """Return the norm of small gradients; if it is not finite, which are not.

        They are copied to one tensor first, of float32 if their dtypes differ. A view
        of each, which `flatten` makes, takes four times as long as its copy.

        Args:
            grads: The gradients.
            kept_elements: Up to so many elements, a function that finds them is
                returned instead; it keeps the copy.
        """
        rows = self._rows
        if rows is None:
            copy = flatten(grads) if len(grads) > 1 else grads[0].clone()
        elif len(rows) == 1:
            copy = torch.cat(grads)
        else:
            copy = flatten([torch.cat([grads[index] for index in row]) for row in rows])
        # Numbers of these dtypes have finite squares in float64.
        norm: float = torch.linalg.vector_norm(copy, dtype=torch.float64).item()
        if math.isfinite(norm):
            return norm, None, None
        if copy.numel() <= kept_elements:
            return norm, None, partial(self._find_in, copy)
        return norm, self._find_in(copy), None

    def _find_in(self, copy: torch.Tensor) -> list[float]:
        """Return NaN or infinity for each gradient that is not finite, else 0."""
        flat = copy.reshape(-1)
        # inf - inf is NaN, which is not 0.
        positions = (flat - flat).nonzero().squeeze(1)
        indices = torch.searchsorted(self._ends, positions, right=True)
        amaxes = torch.zeros(len(self._ends), device="cpu")
        # NaN is the largest.
        amaxes.scatter_reduce_(0, indices, flat[positions].abs().float(), "amax")
        kinds: list[float] = amaxes.tolist()
        if self._order is None:
            return kinds
        ordered = [0.0] * len(kinds)
        for index, kind in zip(self._order, kinds, strict=True):
            ordered[index] = kind
        return ordered

    def multiply_(self, grads: list[torch.Tensor], factor: float) -> None:
        """Multiply gradients of this layout by one float32 number, in place."""
        if not self.is_float32:
            multiply_(grads, factor)
            return
        if factor != self._factor_as_float:
            self._factor.fill_(factor)
            self._factor_as_float = factor
        # Much faster than a product with a Python number. Its check is not needed.
        foreach_unscale_(grads, self._ignored_flag, self._factor)


class HostReader:
    """Reads dense gradients of one layout, step after step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layout: HostLayout | None = None
        self._scale = self._inverse = 1.0
        """The last scale, and its inverse."""

    def forget_layout(self) -> None:
        """Read the layout of the next gradients: their bounds are others."""
        self._layout = None

    def measure(
        self,
        grads: list[torch.Tensor],
        gradient_scale: "GradientScale",
        request: InspectionRequest,
        bounds: list[float],
    ) -> "tuple[GradientSummary, FoundInf]":
        """Return the summary of gradients, and the flag of their device.

        Args:
            grads: The gradients.
            gradient_scale: The scale that they were multiplied by.
            request: What to measure.
            bounds: What each of them may be once unscaled.
        """
        if gradient_scale.scale is None:
            scale, inverse = gradient_scale.on_host()
        else:
            scale = gradient_scale.scale.item()
            if scale != self._scale:
                self._scale, self._inverse = scale, invert(scale)
            inverse = self._inverse
        layout = self._layout
        if layout is None:
            layout = self._layout = HostLayout(grads, bounds)
        numbers, amaxes, unread = measure(
            grads, scale, inverse, request, layout, kept_elements=KEPT_ELEMENTS
        )
        # A copy takes a third of the time of a new tensor.
        flag = _FLAGS[numbers[FOUND_INF]].clone()
        summary = GradientSummary(numbers, amaxes, None, bounds, unread)
        return summary, {self._device: flag}

    @torch.no_grad()
    def multiply_(self, grads: list[torch.Tensor], factor: float) -> None:
        """Multiply gradients that were measured by one float32 number, in place."""
        if self._layout is None:
            multiply_(grads, factor)
        else:
            self._layout.multiply_(grads, factor)


_FLAGS = {
    value: torch.full((), value, dtype=torch.float32, device="cpu")
    for value in (0.0, 1.0)
}


def make_number(value: float) -> torch.Tensor:
    """Return a float32 number in the host's memory."""
    return torch.full((), value, dtype=torch.float32, device="cpu")


def _group_by_row(grads: list[torch.Tensor]) -> list[list[int]] | None:
    """Return which gradients have rows of one kind, and can be copied by one call.

    `None` if that would take too many calls.
    """
    groups: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for index, grad in enumerate(grads):
        if grad.dim() == 0:
            return None
        groups.setdefault((grad.dtype, grad.shape[1:]), []).append(index)
    if len(groups) > 1 + len(grads) // 16:  # a call takes as long as ten views
        return None
    return list(groups.values())


def measure(
    grads: list[torch.Tensor],
    scale: float,
    inverse: float,
    request: InspectionRequest,
    layout: HostLayout,
    *,
    kept_elements: int = 0,
) -> HostMeasurement:
    """Measure gradients.

    The norm is the cheapest read there is. If the norm of all of them is small enough,
    so is every element. If it is not finite, the tensors that are not finite are looked
    up: a sum of squares may be infinite where no element is.

    Args:
        grads: The gradients.
        scale: The scale that they were multiplied by.
        inverse: Its inverse, a float32 number.
        request: What to measure.
        layout: Their layout.
        kept_elements: Up to so many elements, a copy is kept to be read later.
    """
    norm, amaxes, unread, too_large = NOT_MEASURED, None, None, False
    needs_amaxes = True
    was_enabled = torch.is_grad_enabled()
    try:
        set_grad_enabled(False)
        if request.norm_type != math.inf:
            if layout.is_small:
                norm, amaxes, unread = layout.read(grads, kept_elements)
            else:
                norm, amaxes = measure_norm(grads, layout)
            needs_amaxes = request.measure_amax or not (
                (inverse > 0.0 and norm * inverse <= layout.smallest)
                or (amaxes or unread)
                or _is_small(norm, inverse, request, layout)
            )
        if needs_amaxes:
            norm, amaxes, too_large = measure_amaxes(
                grads, norm, inverse, request, layout
            )
            unread = None
        if request.unscale_in_place:
            layout.multiply_(grads, inverse)
    finally:
        set_grad_enabled(was_enabled)
    numbers = _summarize(
        scale,
        inverse,
        norm,
        amaxes,
        request,
        too_large=too_large,
        has_amax=needs_amaxes,
        is_unread=unread is not None,
    )
    return HostMeasurement(numbers, amaxes, unread)


def _is_small(
    norm: float, inverse: float, request: InspectionRequest, layout: HostLayout
) -> bool:
    """Whether gradients of a norm fit their dtypes, where no bound matters."""
    if inverse <= 0.0 or request.compares_with(layout.smallest_bound):
        return False
    return norm * inverse <= layout.smallest_limit


def _summarize(
    scale: float,
    inverse: float,
    norm: float,
    amaxes: list[float] | None,
    request: InspectionRequest,
    *,
    too_large: bool,
    has_amax: bool,
    is_unread: bool,
) -> list[float]:
    """Return the numbers of a summary; `norm` is still scaled."""
    finite, nan, amax = not is_unread, is_unread and math.isnan(norm), NOT_MEASURED
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
    return [
        0.0 if finite and not too_large else 1.0,
        1.0 if nan else 0.0,
        amax,
        norm,
        grad_scale,
        factor,
        scale,
        clip,
        1.0 if too_large else 0.0,
        NOT_MEASURED,
    ]


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
