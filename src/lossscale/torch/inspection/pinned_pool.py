# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory for asynchronous copies from and to a device.

Allocating pinned memory is slower than the copy itself, so buffers are allocated 32 at
a time. A buffer is never reused: the report that holds it may be read at any time, and
a copy to the device may not have begun yet. torch reuses the memory of all 32 when none
of them is needed.
"""

import torch

_BLOCK = 32


class PinnedPool:
    """Hands out pinned buffers of one dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, length: int) -> torch.Tensor:
        """Return a buffer of so many numbers; it is not handed out again."""
        free = self._free.get(length)
        if not free:
            block = torch.empty(
                (_BLOCK, length), dtype=self._dtype, device="cpu", pin_memory=True
            )
            free = self._free[length] = list(block.unbind())
        return free.pop()
