# SPDX-License-Identifier: Apache-2.0
"""Gradients that are spread over ranks as DTensors: their parts, and who has the rest.

Everything else in this package sees the part of a DTensor that is on this rank, as a
plain tensor. Where its other parts are is said by the mesh and the placements.
`torch.distributed.tensor` is never imported here: where nobody has imported it there
are no DTensors.
"""

import sys
from typing import Any

import torch


def dtensor_class() -> Any:
    """Return torch's DTensor, or `None` if there can be no such tensor yet."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Any) -> Any:
    """Return the part of a tensor that is on this rank, sharing its memory."""
    if not is_sharded(tensor):
        return tensor
    part = tensor._local_tensor
    # What a collective has not finished yet is waited for, as torch does on first use.
    return part.wait() if hasattr(part, "trigger_wait") else part


def settle(parameters: list[Any]) -> None:
    """Have gradients spread over ranks as their parameters are.

    Of a DTensor with a partial placement every rank has a summand: each may be finite
    and their sum not, and no norm can be taken of them. The optimizer would have it
    added up anyway.
    """
    kind = dtensor_class()
    if kind is None:
        return
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, kind) or not isinstance(parameter, kind):
            continue
        wanted = parameter.placements
        if gradient.placements != wanted:
            with torch.no_grad():
                parameter.grad = gradient.redistribute(placements=wanted)


def put_back(part: Any, like: Any) -> Any:
    """Return a part of this rank as a DTensor that is spread as another one is."""
    kind = dtensor_class()
    if kind is None or not isinstance(like, kind):
        return part
    return kind.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
