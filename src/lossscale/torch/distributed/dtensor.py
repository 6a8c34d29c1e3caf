# SPDX-License-Identifier: Apache-2.0
"""DTensor gradients: the shard of this rank, and redistribution.

The rest of the package sees the local shard of a DTensor, as a plain tensor.
`torch.distributed.tensor` is never imported here: if no code has imported it, there are
no DTensors.
"""

import sys
from typing import TYPE_CHECKING

import torch

from lossscale.torch.torch_internals import finish_collective, local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def dtensor_class() -> "type[DTensor] | None":
    """Return torch's DTensor, or `None` if no code has imported it yet."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def as_dtensor(tensor: object) -> "DTensor | None":
    """Return a tensor if it is a DTensor, else `None`."""
    kind = dtensor_class()
    return tensor if kind is not None and isinstance(tensor, kind) else None


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a tensor that this rank has, sharing its memory."""
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return tensor
    # torch waits for an unfinished collective on first use; so does this.
    return finish_collective(local_tensor(dtensor))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is whole on this rank."""
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.full_tensor()


def redistribute_grads(params: list[torch.Tensor]) -> None:
    """Redistribute gradients to the placements of their parameters.

    With a partial placement every rank has a summand: each may be finite and their sum
    not, and there is no norm of them. The optimizer would have them added up anyway.
    """
    for param in params:
        grad, dtensor = as_dtensor(param.grad), as_dtensor(param)
        if grad is None or dtensor is None:
            continue
        if grad.placements != dtensor.placements:
            with torch.no_grad():
                param.grad = grad.redistribute(placements=dtensor.placements)


def from_local_shard(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as a DTensor that is distributed as another one is."""
    kind, dtensor = dtensor_class(), as_dtensor(like)
    if kind is None or dtensor is None:
        return shard
    return kind.from_local(
        shard,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )
