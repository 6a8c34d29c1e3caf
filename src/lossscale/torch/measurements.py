# SPDX-License-Identifier: Apache-2.0
"""What `unscale` measures in addition to finiteness, when it is asked to."""

from typing import TYPE_CHECKING, Any

import torch

from lossscale.core import trees
from lossscale.core.measurements import (
    AboveEdge,
    Measurement,
    find_edge,
    list_fields,
)
from lossscale.torch.gradient import common_device, move, upcast, values

if TYPE_CHECKING:
    from collections.abc import Callable

_BITS = {
    # The integer of the same size, and the smallest normal number's bits.
    torch.float16: (torch.int16, 0x0400),
    torch.bfloat16: (torch.int16, 0x0080),
    torch.float32: (torch.int32, 0x0080_0000),
    torch.float64: (torch.int64, 0x0010_0000_0000_0000),
}


def measure(
    grads: Any, unscaled: Any, names: frozenset[Measurement], device: torch.device
) -> dict[str, torch.Tensor]:
    """Measure what was asked for; sums are kept in float64.

    Args:
        grads: A nested structure of scaled gradients.
        unscaled: The same, unscaled.
        names: What to measure.
        device: Where the results go if there are no gradients.
    """
    scaled = [values(leaf) for _, leaf in trees.leaves(grads)]
    divided = [values(leaf) for _, leaf in trees.leaves(unscaled)]
    target = common_device(scaled, device)
    # float32, or float64 where a gradient is: its largest value may need it.
    has_float64 = any(x.dtype is torch.float64 for x in scaled)
    result_dtype = torch.float64 if has_float64 else torch.float32
    # Apple's GPUs have no float64.
    sum_dtype = torch.float32 if target.type == "mps" else torch.float64
    size = max(1, sum(x.numel() for x in scaled))

    def gather(results: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return scalars of all gradients, and a 0, in one tensor."""
        zero = torch.zeros((), dtype=dtype, device=target)
        return torch.stack([zero, *(move(x.to(dtype), target) for x in results)])

    def fraction(flags: list[torch.Tensor]) -> torch.Tensor:
        """Return the fraction of all values that has its flag set."""
        counts = gather([flag.sum() for flag in flags], sum_dtype)
        return (counts.sum() / size).to(torch.float32)

    measures: dict[str, Callable[[], torch.Tensor]] = {
        "nan": lambda: gather([x.isnan().any() for x in scaled], torch.bool).any(),
        "amax": lambda: gather([_largest(x) for x in scaled], result_dtype).max(),
        "norm": lambda: torch.linalg.vector_norm(
            gather([_norm(x, sum_dtype) for x in divided], sum_dtype)
        ).to(result_dtype),
        "zero_fraction": lambda: fraction([_magnitude(x) < 1 for x in scaled]),
        "subnormal_fraction": lambda: fraction([_subnormal(x) for x in scaled]),
    }
    edge = find_edge(names)
    if edge is not None:
        measures["above_edge"] = lambda: fraction([_above(x, edge) for x in scaled])
    return {name: measures[name]() for name in list_fields(names)}


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest finite magnitude in a tensor; 0 in one without any."""
    if x.numel() == 0:
        return torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(x.isfinite(), x.abs(), 0.0).max()


def _norm(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of one tensor, with its squares summed in a dtype."""
    norm: torch.Tensor = torch.linalg.vector_norm(
        x, dtype=torch.promote_types(x.dtype, dtype)
    )
    return norm


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor without the sign.

    Bits and not values: a processor can be set to take subnormal numbers for zero.
    """
    kind, _ = _BITS[x.dtype]
    return x.view(kind) & torch.iinfo(kind).max


def _above(x: torch.Tensor, edge: AboveEdge) -> torch.Tensor:
    """Return which values have a magnitude above an edge."""
    magnitudes = upcast(x).abs()
    return magnitudes >= edge.edge if edge.inclusive else magnitudes > edge.edge


def _subnormal(x: torch.Tensor) -> torch.Tensor:
    """Return which values are below the smallest normal number of their dtype."""
    _, smallest_normal = _BITS[x.dtype]
    magnitude = _magnitude(x)
    return (magnitude > 0) & (magnitude < smallest_normal)
