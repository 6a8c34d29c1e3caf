# SPDX-License-Identifier: Apache-2.0
"""Small tensors of the host, and their copies to a device that nothing waits for."""

from typing import Any

import torch


def copy_later(host: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Copy to a device while the host goes on; return what it is copied from.

    A graph copies from the same memory at every replay, so it must be kept for it.
    """
    source = host if table.device.type == "cpu" else host.pin_memory()
    table.copy_(source, non_blocking=True)
    return source


def make_tensor(numbers: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Return numbers as a tensor of the host, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=dtype or torch.float64, device="cpu")
