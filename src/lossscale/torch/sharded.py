# SPDX-License-Identifier: Apache-2.0
"""`ShardedGradScaler`: in place of the scaler that torch has for FSDP1.

It is a `GradScaler` for gradients of which every rank has a part. Three things that
torch's does wrong are right here: the ranks agree on every path, also where a fused
optimizer is stepped without `unscale_`; the flag is 0 or 1, however many ranks have
found something; and a float16 loss is multiplied in float32.
"""

from typing import Any

from torch import distributed

from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.ranks import Declared, Plan, declared


class ShardedGradScaler(GradScaler):
    """A scaler for FSDP1, with the arguments of torch's in torch's order.

    Back-off comes before growth in it. What `GradScaler` has beside is taken by name.
    Gradients are parts of a whole: `clip_grad_norm_` adds the norms of all ranks up.
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
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        """Make a scaler.

        Args:
            device: The kind of device, as torch has it.
            init_scale: The scale to start with.
            backoff_factor: What it is multiplied by after a skipped step.
            growth_factor: What it is multiplied by after enough clean steps.
            growth_interval: How many clean steps in a row make it grow.
            enabled: If not, every method does what it would without a scaler.
            process_group: The ranks that have the parts. `None` for all ranks; then the
                process group may be initialized later than the scaler is made.
            **settings: What `GradScaler` takes beside. Unlike there, float16 gradients
                are unscaled in place, as with torch's class: `allow_fp16=False` refuses
                them.
        """
        if process_group is not None:
            settings["sharded"] = process_group
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            **{"allow_fp16": True, **settings},
        )
        self.process_group = process_group

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True
    ) -> dict[Any, Any]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _plan(self, optimizer: Any) -> Plan | None:
        running = distributed.is_available() and distributed.is_initialized()
        if running and not self._declared.agreeing:
            world = distributed.group.WORLD
            self._declared = declared(None, None, world)
        return super()._plan(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled; all ranks are found again where it is unpickled."""
        if self.process_group is None:
            self._declared = Declared()
        return super().__getstate__()
