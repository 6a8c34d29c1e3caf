# SPDX-License-Identifier: Apache-2.0
"""Gradient checks as torch operators, for functions that are compiled.

`GradScaler` calls the kernels directly: it knows its gradients from step to step.
`torch.compile` and fake tensors know nothing of pointers and tables; they see these
operators, which do the same on any list of tensors. In a compiled function:

    found_inf, norm, grad_scale, factor, amaxes = torch.ops.lossscale.check_grads(
        grads, scale, max_norm
    )
    torch.ops.lossscale.multiply_grads_(grads, factor)

`found_inf` and `grad_scale` are what fused optimizers take; `factor` unscales and clips
in place; `amaxes` has the largest magnitude of each tensor, still scaled.
"""

import math
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from lossscale.torch.inspection.groups import GradientGroups, GradientScale
from lossscale.torch.inspection.headroom import bounds_without_optimizer
from lossscale.torch.inspection.request import InspectionRequest
from lossscale.torch.inspection.summary import (
    FACTOR,
    FOUND_INF,
    GRAD_SCALE,
    HEADER,
    NORM,
    NOT_MEASURED,
)

if TYPE_CHECKING:
    from lossscale.torch.inspection.kernels.launch import Tables

Checked: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_kept_tables: "list[Tables]" = []
"""What CUDA graphs read of captured calls. An operator cannot know when a graph is
deleted, so these few numbers per tensor stay for the life of the process."""


@torch.library.custom_op("lossscale::check_grads", mutates_args=())
def check_grads(grads: list[Tensor], scale: Tensor, max_norm: float | None) -> Checked:
    """Check gradients; nothing is written to them.

    Args:
        grads: Still scaled, of one device.
        scale: The scale that they carry: one float32 number, on that device.
        max_norm: The norm to clip the unscaled gradients to; `None` for no clipping.

    Returns:
        `found_inf`, the unscaled norm, `grad_scale`, the factor, and the largest
        magnitude of each tensor.
    """
    limit = math.inf if max_norm is None else max_norm
    return _check(grads, scale, InspectionRequest(max_norm=limit, measure_norm=True))


@torch.library.custom_op("lossscale::unscale_grads_", mutates_args=("grads",))
def unscale_grads_(grads: list[Tensor], scale: Tensor) -> Checked:
    """Unscale gradients in place; return the check of the scaled ones."""
    return _check(grads, scale, InspectionRequest(unscale_in_place=True))


@torch.library.custom_op("lossscale::multiply_grads_", mutates_args=("grads",))
def multiply_grads_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by one number: clip and unscale them."""
    GradientGroups(grads, _kept_tables).multiply_(grads, factor)


def _check(grads: list[Tensor], scale: Tensor, request: InspectionRequest) -> Checked:
    groups = GradientGroups(grads, _kept_tables)
    groups.set_bounds(bounds_without_optimizer(grads))
    summary, _ = groups.measure(grads, GradientScale(scale), request)
    buffer = summary.to_buffer()
    amaxes = buffer[HEADER:]
    if len(amaxes) < len(grads):
        amaxes = buffer.new_full((len(grads),), NOT_MEASURED)
    found_inf, norm, grad_scale, factor = (
        buffer[index].clone() for index in (FOUND_INF, NORM, GRAD_SCALE, FACTOR)
    )
    return found_inf, norm, grad_scale, factor, amaxes.clone()


@check_grads.register_fake
def _(grads: list[Tensor], scale: Tensor, max_norm: float | None) -> Checked:
    del max_norm
    return _fake(grads, scale)


@unscale_grads_.register_fake
def _(grads: list[Tensor], scale: Tensor) -> Checked:
    return _fake(grads, scale)


@multiply_grads_.register_fake
def _(grads: list[Tensor], factor: Tensor) -> None:
    del grads, factor


def _fake(grads: list[Tensor], scale: Tensor) -> Checked:
    first, second, third, fourth = (scale.new_empty(()) for _ in range(4))
    return first, second, third, fourth, scale.new_empty(len(grads))
