# SPDX-License-Identifier: Apache-2.0
"""`ShardedGradScaler`: in place of the scaler that torch has for FSDP1.

It is a `GradScaler` for gradients of which every rank has a shard. Three defects of
torch's class are not in it: the ranks decide together on every path, also where a fused
optimizer is stepped without `unscale_`; the flag is 0 or 1, however many ranks have
found something; and a float16 loss is multiplied in float32.
"""

from typing import Any, Literal

import torch

from lossscale.torch.distributed.rank_groups import GroupsOrMeshes
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.inspection.groups import FoundInf


class ShardedGradScaler(GradScaler):
    """A scaler for FSDP1, with the arguments of torch's class in torch's order.

    Back-off comes before growth in it. The other arguments of `GradScaler` are passed
    by name. Gradients are shards: `clip_grad_norm_` adds the norms of all ranks up.
    FSDP2 needs nothing of this; there `GradScaler` is enough.

    Example:
        >>> from lossscale.torch import ShardedGradScaler
        >>> scaler = ShardedGradScaler("cpu", 2.0**10, 0.25, 4.0)
        >>> scaler.get_backoff_factor(), scaler.get_growth_factor()
        (0.25, 4.0)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float | Literal["auto"] = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: GroupsOrMeshes | None = None,
        **settings: Any,
    ) -> None:
        """Make a scaler.

        Args:
            device: The kind of device, as torch has it.
            init_scale: The initial scale, or "auto" to find it on the first batch.
            backoff_factor: The factor of a back-off, after a skipped step.
            growth_factor: The factor of a growth, after enough finite steps.
            growth_interval: How many consecutive finite steps make the scale grow.
            enabled: If not, every method does what it would without a scaler.
            process_group: The ranks that have the shards. `None` for all ranks; then
                the process group may be initialized after the scaler is made.
            **settings: The other arguments of `GradScaler`. Unlike there, float16
                gradients are unscaled in place, as with torch's class: pass
                `allow_fp16=False` to refuse them.
        """
        shard_groups = "world" if process_group is None else process_group
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            **{"allow_fp16": True, "shard_groups": shard_groups, **settings},
        )
        self.process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> FoundInf:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
