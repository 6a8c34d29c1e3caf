# SPDX-License-Identifier: Apache-2.0
"""Norms and magnitudes on a CPU, tensor by tensor: where one sum does not answer.

Gradients that are large in number, of several dtypes, not finite, or so large or small
that a sum of squares in float32 says too little.
"""

import math
from typing import TYPE_CHECKING

import torch

from lossscale.core.validation import FLOAT32_MAX
from lossscale.torch.inspection.eager import amax_per_tensor, norms_of
from lossscale.torch.inspection.request import InspectionRequest
from lossscale.torch.torch_internals import foreach_norm

if TYPE_CHECKING:
    from lossscale.torch.inspection.host import HostLayout

_LOST_TO_UNDERFLOW = 2.0**-45
"""Squares of a float32 norm below this may have lost too much to underflow."""


def measure_norm(
    grads: list[torch.Tensor], layout: "HostLayout"
) -> tuple[float, list[float] | None]:
    """Return the norm of all gradients; in float64 where float32 is not enough.

    If some are not finite, also NaN or infinity for each of them and a finite number
    for each other; else `None`, also if only the norm is infinite.
    """
    if layout.is_plain:
        norms = torch.stack(foreach_norm(grads, 2))
        norm: float = torch.linalg.vector_norm(norms, dtype=torch.float64).item()
        if not norm < _LOST_TO_UNDERFLOW:
            return norm, None if math.isfinite(norm) else _find(grads, norms)
    if not grads:
        return 0.0, None
    norms = norms_of(grads)
    norm = torch.linalg.vector_norm(norms).item()
    return norm, None if math.isfinite(norm) else _find(grads, norms)


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


def measure_amaxes(
    grads: list[torch.Tensor],
    norm: float,
    inverse: float,
    request: InspectionRequest,
    layout: "HostLayout",
) -> tuple[float, list[float], bool]:
    """Return the norm, the largest magnitudes, and whether one of them is too large."""
    if math.isinf(norm):  # in float64 it may be finite
        norm = torch.linalg.vector_norm(norms_of(grads)).item()
    amaxes: list[float] = amax_per_tensor(grads).tolist()
    if request.norm_type == math.inf:
        norm = max(amaxes, key=_nan_last)
    too_large = False
    if request.compares_with(layout.smallest_bound):
        pairs = zip(amaxes, layout.bounds, strict=True)
        too_large = any(amax * inverse > bound for amax, bound in pairs)
    pairs = zip(amaxes, layout.limits, strict=True)
    return norm, [_limit_amax(amax, inverse, limit) for amax, limit in pairs], too_large


def _limit_amax(amax: float, inverse: float, limit: float) -> float:
    """Return a magnitude as a summary has it: infinite if it cannot be unscaled."""
    usable = math.isnan(amax) or (inverse > 0.0 and amax * inverse <= limit)
    return min(amax, FLOAT32_MAX) if usable else math.inf  # NaN stays NaN


def _nan_last(number: float) -> tuple[bool, float]:
    """Return a key that sorts magnitudes as torch's maximum does: NaN is largest."""
    return math.isnan(number), number
