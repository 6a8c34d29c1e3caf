# SPDX-License-Identifier: Apache-2.0
"""`WriteGuard`: copies a parameter when an operator is about to write to it.

A forward and a backward pass write to no parameter, so that the copies of a large model
would be for nothing. If one is written to after all, it is put back.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.explain.kinds import address_of
from lossscale.torch.torch_internals import is_mutable


class WriteGuard(TorchDispatchMode):
    """Keeps what parameters were before an operator wrote to them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guarded = {
            address: tensor
            for tensor in tensors
            if (address := address_of(tensor)) is not None
        }
        self._copies: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator; before that, copy what it writes to."""
        kwargs = kwargs or {}
        if is_mutable(func):
            for value in tree_flatten((args, kwargs))[0]:
                if isinstance(value, torch.Tensor):
                    self._keep(value)
        return func(*args, **kwargs)

    def _keep(self, tensor: torch.Tensor) -> None:
        address = address_of(tensor)
        if address is None or address in self._copies:
            return
        guarded = self._guarded.get(address)
        if guarded is not None:
            self._copies[address] = local_shard(guarded.detach()).clone()

    def restore(self) -> None:
        """Put back what was written to."""
        with torch.no_grad():
            for address, copy in self._copies.items():
                local_shard(self._guarded[address].detach()).copy_(copy)
        self._copies.clear()
