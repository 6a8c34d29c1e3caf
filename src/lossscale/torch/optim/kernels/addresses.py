# SPDX-License-Identifier: Apache-2.0
"""`GradientAddresses`: where the gradients are, copied only when that changed."""

from array import array

import torch

from lossscale.torch.optim.kernels.host_copies import copy_later


class GradientAddresses:
    """The addresses of the gradients, on the device."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.table = torch.zeros(count, dtype=torch.int64, device=device)
        self.is_aligned = False
        self._known: list[int] | None = None
        self._version: int | None = None
        self._pinned: torch.Tensor | None = None

    def set(
        self,
        grads: list[torch.Tensor | None],
        *,
        has_all: bool,
        version: int | None = None,
    ) -> None:
        """Copy the addresses of gradients if they changed; 0 where there is none.

        Args:
            grads: The gradients.
            has_all: Whether none of them is `None`.
            version: What `version_of` says of them.
        """
        known = self._known
        if known is not None and version is not None and version == self._version:
            return
        addresses = _addresses_of(grads, has_all=has_all)
        if addresses == known:
            self._version = version
            return
        # Unknown until they are copied: a failure here is retried at the next step.
        self._known = self._version = None
        host = torch.frombuffer(array("q", addresses), dtype=torch.int64)
        self._pinned = copy_later(host, self.table)
        self.is_aligned = not (host & 15).any()
        self._known, self._version = addresses, version


def _addresses_of(grads: list[torch.Tensor | None], *, has_all: bool) -> list[int]:
    """Return addresses; an empty tensor, whose own is 0, has another one here."""
    if not has_all:
        return [0 if grad is None else grad.data_ptr() or 16 for grad in grads]
    addresses = list(map(torch.Tensor.data_ptr, grads))  # type: ignore[arg-type]
    return [address or 16 for address in addresses] if 0 in addresses else addresses
