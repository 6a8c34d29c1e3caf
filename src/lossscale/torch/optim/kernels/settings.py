# SPDX-License-Identifier: Apache-2.0
"""`Settings`: the numbers of the parameter groups, copied only when they changed."""

import math

import torch

from lossscale.errors import ContextError
from lossscale.torch.devices import is_capturing
from lossscale.torch.optim.kernels.host_copies import copy_later, make_tensor
from lossscale.torch.optim.kernels.memory import SCALARS


class Settings:
    """The settings of the groups, on the device."""

    def __init__(self, groups: int, device: torch.device) -> None:
        self.table = torch.zeros(
            (groups, SCALARS.value), dtype=torch.float64, device=device
        )
        self._known: list[list[float]] = []

    def copy(self, settings: list[list[float]]) -> None:
        """Copy the settings if they are not those that are there."""
        if settings == self._known:
            return
        if is_capturing(self.table.device):
            message = (
                "A setting of the optimizer, such as its learning rate, has changed "
                "since its last step, and a CUDA graph would keep the old one. Call "
                "optimizer.copy_settings() before the capture."
            )
            raise ContextError(message)
        self._known = []
        width = SCALARS.value
        host = make_tensor([row + [0.0] * (width - len(row)) for row in settings], None)
        copy_later(host, self.table)
        self._known = settings

    def copy_rate(self, group: int, rate: torch.Tensor) -> None:
        """Copy a learning rate that is a tensor of a device; graphs do so too."""
        self.table[group, 0].copy_(rate.reshape(()), non_blocking=True)


_ON_DEVICE = math.nan
"""A learning rate that the host does not know: unlike any that it does. This object is
equal to itself in a list."""


def host_rate(rate: float | torch.Tensor) -> float:
    """Return a learning rate that the host knows; NaN for a tensor of a device."""
    if isinstance(rate, torch.Tensor):
        return rate.item() if rate.device.type == "cpu" else _ON_DEVICE
    return float(rate)
