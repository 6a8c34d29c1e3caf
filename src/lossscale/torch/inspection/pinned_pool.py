# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory for asynchronous copies from a device.

Allocating pinned memory is slower than the copy itself, so buffers are allocated 32 at
a time. A buffer is never reused: the report that holds it may be read at any time.
"""

import torch

_BLOCK = 32


class PinnedPool:
    """Hands out pinned float32 buffers."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, length: int) -> torch.Tensor:
        """Return a buffer of so many numbers; it is not handed out again."""
        free = self._free.get(length)
        if not free:
            block = torch.empty(
                (_BLOCK, length), dtype=torch.float32, device="cpu", pin_memory=True
            )
            free = self._free[length] = list(block.unbind())
        return free.pop()
