# SPDX-License-Identifier: Apache-2.0
"""The looks at gradients as torch operators, for what is compiled.

`GradScaler` calls the kernels directly: it knows its gradients from step to step.
`torch.compile` and fake tensors know nothing of pointers and tables; they see these
operators, which do the same on any list of tensors and say what comes out of them. In a
compiled function:

    verdict = torch.ops.lossscale.look(gradients, scale, max_norm)
    found, norm, divisor = verdict[FOUND], verdict[NORM], verdict[DIVISOR]

The layout of a verdict is in `verdict.py`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lossscale.torch.eager import Request
from lossscale.torch.gradients import Sorted
from lossscale.torch.headroom import bounds_of_unknown
from lossscale.torch.verdict import HEADER, NOT_MEASURED

_CAPTURED: list[Any] = []
"""What CUDA graphs read of calls that were captured; nobody knows for how long."""


@torch.library.custom_op("lossscale::look", mutates_args=())
def look(
    gradients: list[Tensor], scale: Tensor, max_norm: float | None = None
) -> Tensor:
    """Return the verdict on gradients; nothing is written.

    Args:
        gradients: As they came, still scaled, of one device.
        scale: The scale that they carry: one float32 number, on that device.
        max_norm: What the norm of the unscaled gradients is clipped to, if at all.
    """
    cap = math.inf if max_norm is None else max_norm
    return _whole(gradients, scale, Request(max_norm=cap, with_norm=True))


@torch.library.custom_op("lossscale::unscale_", mutates_args=("gradients",))
def unscale_(gradients: list[Tensor], scale: Tensor) -> Tensor:
    """Unscale gradients in place; return the verdict on them as they came."""
    return _whole(gradients, scale, Request(write=True))


def _whole(gradients: list[Tensor], scale: Tensor, request: Request) -> Tensor:
    """Return a verdict that has a number for every tensor, measured or not."""
    known = Sorted(gradients, _CAPTURED)
    known.set_bounds(bounds_of_unknown(gradients))
    buffer, _ = known.measure(gradients, scale, None, request)
    missing = HEADER + len(gradients) - len(buffer)
    if not missing:
        return buffer
    return torch.cat([buffer, buffer.new_full((missing,), NOT_MEASURED)])


@torch.library.custom_op("lossscale::multiply_", mutates_args=("gradients",))
def multiply_(gradients: list[Tensor], verdict: Tensor) -> None:
    """Multiply gradients in place by the factor of a verdict: clip and unscale them."""
    Sorted(gradients, _CAPTURED).multiply_(gradients, verdict)


@look.register_fake
def _(gradients: list[Tensor], scale: Tensor, max_norm: float | None = None) -> Tensor:
    del max_norm
    return scale.new_empty(HEADER + len(gradients))


@unscale_.register_fake
def _(gradients: list[Tensor], scale: Tensor) -> Tensor:
    return scale.new_empty(HEADER + len(gradients))


@multiply_.register_fake
def _(gradients: list[Tensor], verdict: Tensor) -> None:
    del gradients, verdict
