# SPDX-License-Identifier: Apache-2.0
"""Small buffers for every step, allocated 32 at a time.

Allocating pinned memory is slower than a copy to it. On a device, a small allocation in
every step would also move the small gradients of the next one to other addresses, which
the kernels would have to be given again.

A buffer is never handed out twice: the report that holds it may be read at any time,
and a copy from it may not have begun yet. torch reuses the memory when none of the 32
is needed. It knows of its own copies to pinned memory and waits for them; a buffer that
a kernel writes to is kept here until it has.
"""

from collections import deque
from typing import Protocol

import torch

from lossscale.torch.devices import current_stream

_BLOCK = 32

_ALIGNED = 128
"""So many numbers from one buffer to the next keep each of them aligned as an
allocation of its own is, which compiled kernels count on."""


class PinnedPool:
    """Hands out pinned host buffers of one dtype, for copies without a wait."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, length: int) -> torch.Tensor:
        """Return a buffer of so many numbers; it is not handed out again."""
        free = self._free.get(length)
        if not free:
            block = torch.empty(
                _shape_of(length), dtype=self._dtype, device="cpu", pin_memory=True
            )
            free = self._free[length] = list(block[:, :length].unbind())
        return free.pop()


class Event(Protocol):
    """What `torch.cuda.Event` has."""

    def query(self) -> bool:
        """Whether everything before it has happened."""
        ...


_written: deque[tuple[Event, torch.Tensor]] = deque()
"""Buffers to which kernels write, in the order of their launches."""


def keep_until(event: Event, buffer: torch.Tensor) -> None:
    """Keep a buffer at least until an event; drop those whose events have happened.

    Not while the current stream is being captured: CUDA forbids the question.
    """
    _written.append((event, buffer))
    while _written and _written[0][0].query():
        _written.popleft()


class DevicePool:
    """Hands out float32 buffers of one length on a CUDA device."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._length = length
        self._device = device
        self._free: dict[torch.cuda.Stream, list[torch.Tensor]] = {}

    def take(self) -> torch.Tensor:
        """Return a buffer for the current stream; it is not handed out again."""
        stream = current_stream(self._device)
        free = self._free.get(stream)
        if not free:
            block = torch.empty(
                _shape_of(self._length), dtype=torch.float32, device=self._device
            )
            # `data`, not views: torch would count writes to one as writes to all.
            rows = block[:, : self._length].unbind()
            free = self._free[stream] = [row.data for row in rows]
        return free.pop()


def _shape_of(length: int) -> tuple[int, int]:
    """Return the shape of a block of buffers."""
    return _BLOCK, -(-length // _ALIGNED) * _ALIGNED
