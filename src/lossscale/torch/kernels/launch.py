# SPDX-License-Identifier: Apache-2.0
"""The host's side of the kernels: tables, launches, and nothing that waits.

Which chunk belongs to which tensor stays while the shapes stay, and is kept in
`Tables`. Where the gradients are is written anew for every step, because a backward
pass may allocate them anew.
"""

import math
from array import array
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl

from lossscale.torch.devices import capturing, on
from lossscale.torch.eager import LIMITS, Request
from lossscale.torch.kernels import decisions
from lossscale.torch.kernels import gradients as over_gradients
from lossscale.torch.verdict import HEADER

KINDS = {
    torch.float32: (0, tl.float32),
    torch.float16: (1, tl.float16),
    torch.bfloat16: (2, tl.bfloat16),
    torch.float64: (3, tl.float64),
}
"""How the kernels name a dtype, and Triton's word for it."""

BLOCK = 4096
"""How many numbers a program takes at a time."""
LOOPS = 8
"""How many times it does that."""
WARPS = 4

_at_once = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
"""torch's comparison of many addresses, in C++; only there if torch has CUDA."""


def _host(numbers: Iterable[float], dtype: Any) -> Any:
    """Return numbers as a tensor of the host, whatever torch's default device is."""
    return torch.tensor(list(numbers), dtype=dtype, device="cpu")


class Repeated:
    """Kernels that are launched on the same tensors again and again.

    To find out which compiled kernel fits costs Triton more than to launch it. It looks
    at the alignment of tensors and at whole numbers. Here these are the same as ever;
    what is new is newly allocated, which is aligned, or is read one number at a time,
    where alignment does not matter.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def launch(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Launch a kernel.

        Args:
            kernel: What Triton compiles.
            programs: How many of them.
            arguments: Tensors and numbers, in the kernel's order.
            constants: What comes after them.
        """
        key = (id(kernel), constants, arguments[0].device)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[programs, 1, 1](*arguments, *constants)
            return
        compiled = kernel[(programs,)](*arguments, *constants, num_warps=WARPS)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[key] = compiled


class Tables(Repeated):
    """What the kernels know of one list of tensors while its layout stays."""

    def __init__(self, gradients: list[Any], bounds: list[float]) -> None:
        super().__init__()
        counts = [gradient.numel() for gradient in gradients]
        dtypes = [gradient.dtype for gradient in gradients]
        device = gradients[0].device
        self.device = device
        self.tensors = len(counts)
        several = set(dtypes)
        self.mixed = len(several) > 1
        self.dtype = KINDS[next(iter(several))][1]
        each = [-(-count // (BLOCK * LOOPS)) for count in counts]
        starts = _host(list(accumulate(each, initial=0)), torch.int32)
        self.chunks = int(starts[-1])
        tensors = torch.repeat_interleave(
            _host(range(self.tensors), torch.int32), _host(each, torch.int64)
        )
        numbers = _host(range(self.chunks), torch.int32) - starts[tensors.long()]
        kinds = _host([KINDS[dtype][0] for dtype in dtypes], torch.int32)
        limits = _host([LIMITS[dtype] for dtype in dtypes], torch.float64)
        headroom = _host(bounds, torch.float64)
        sizes = _host(counts, torch.int64)
        self._held: list[Any] = []
        # In one copy. The numbers of 8 bytes come first, so that all are aligned.
        wide = torch.cat([sizes, limits.view(torch.int64), headroom.view(torch.int64)])
        narrow = torch.cat([starts, kinds, tensors, numbers])
        if len(narrow) % 2:
            narrow = torch.cat([narrow, narrow[:1]])
        together = self.moved(torch.cat([wide, narrow.view(torch.int64)]))
        self.sizes = together[: self.tensors]
        self.limits, self.bounds = (
            together[self.tensors : 3 * self.tensors]
            .view(torch.float64)
            .split(self.tensors)
        )
        (self.starts, self.kinds, self.chunk_tensors, self.chunk_numbers, _) = (
            together[3 * self.tensors :]
            .view(torch.int32)
            .split(
                [
                    self.tensors + 1,
                    self.tensors,
                    self.chunks,
                    self.chunks,
                    len(narrow) - 2 * (self.tensors + self.chunks) - 1,
                ]
            )
        )
        room = torch.empty(
            2 * (self.chunks + self.tensors), dtype=torch.float64, device=device
        )
        self.sums, self.tops, self.tensor_sums, self.tensor_tops = room.split(
            [self.chunks, self.chunks, self.tensors, self.tensors]
        )
        self.finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._addresses: list[int] = []
        self._every = list(range(self.tensors))
        self.pointers = torch.empty(self.tensors, dtype=torch.int64, device=device)
        self.aligned = False

    @property
    def chunked(self) -> tuple[Any, ...]:
        """What every kernel over the gradients takes after the pointers."""
        return self.sizes, self.kinds, self.chunk_tensors, self.chunk_numbers

    @property
    def room(self) -> tuple[Any, ...]:
        """Where sums and tops go, of chunks and of tensors."""
        return self.sums, self.tops, self.tensor_sums, self.tensor_tops

    def point(self, gradients: list[Any]) -> None:
        """Write down where the gradients are now."""
        known = self._addresses
        if known and _at_once is not None and _at_once(gradients, known, self._every):
            return
        addresses = list(map(torch.Tensor.data_ptr, gradients))
        if addresses == self._addresses:
            return
        # Not known until they are written: what fails here is tried again.
        self._addresses = []
        found = torch.frombuffer(array("q", addresses), dtype=torch.int64)
        self.aligned = not (found & 15).any()
        self.pointers.copy_(self._pinned(found), non_blocking=True)
        self._addresses = addresses

    def moved(self, tensor: Any) -> Any:
        """Return a copy on the device, made without waiting."""
        return self._pinned(tensor).to(self.device, non_blocking=True)

    def _pinned(self, tensor: Any) -> Any:
        """Return a copy from which a device can read while the host goes on."""
        if self.device.type == "cpu":
            return tensor
        pinned = tensor.pin_memory()
        if capturing(self.device):
            # A graph copies from the same host memory whenever it is replayed.
            self._held.append(pinned)
        return pinned


class Launcher:
    """The kernels for one group of gradients whose layout stays."""

    def __init__(self, captured: list[Any], bounds: list[float]) -> None:
        """Start without tables.

        Args:
            captured: Where to keep those that a CUDA graph will read.
            bounds: What each gradient may be once unscaled; see `headroom.py`.
        """
        self._tables: Tables | None = None
        self._captured = captured
        self._bounds = bounds

    def set_bounds(self, bounds: list[float]) -> None:
        """Set what each gradient may be once unscaled; see `headroom.py`."""
        self._bounds, self._tables = bounds, None

    def measure(
        self, gradients: list[Any], scale: Any, request: Request, *, inverted: bool
    ) -> Any:
        """Return the buffer of a verdict; see `verdict.py`.

        Args:
            gradients: Dense real tensors of one device, always of the same layout.
            scale: The scale that they carry: one float32 number, on that device.
            request: What is wanted.
            inverted: Whether `scale` is the inverse of it.
        """
        tables = self._pointed(gradients)
        buffer = torch.empty(
            HEADER + tables.tensors, dtype=torch.float32, device=tables.device
        )
        with on(tables.device):
            if tables.chunks:
                tables.launch(
                    over_gradients.read,
                    tables.chunks,
                    (tables.pointers, *tables.chunked, scale, tables.sums, tables.tops),
                    (
                        tables.dtype,
                        tables.mixed,
                        inverted,
                        request.write,
                        tables.aligned,
                        BLOCK,
                        LOOPS,
                    ),
                )
            tables.launch(
                decisions.decide,
                tables.tensors,
                (
                    tables.starts,
                    tables.limits,
                    tables.bounds,
                    *tables.room,
                    scale,
                    buffer,
                    tables.finished,
                    tables.tensors,
                    float(request.max_norm),
                ),
                (
                    request.norm_type != math.inf,
                    request.max_norm < math.inf,
                    request.checks_headroom(self._bounds),
                    request.in_optimizer,
                    inverted,
                ),
            )
        return buffer

    def multiply_(self, gradients: list[Any], factor: Any) -> None:
        """Multiply the gradients by one float32 number of their device, in place."""
        tables = self._pointed(gradients)
        if tables.chunks:
            with on(tables.device):
                tables.launch(
                    over_gradients.multiply,
                    tables.chunks,
                    (tables.pointers, *tables.chunked, factor),
                    (tables.dtype, tables.mixed, tables.aligned, BLOCK, LOOPS),
                )

    def _pointed(self, gradients: list[Any]) -> Tables:
        """Return the tables, with the places where the gradients are now."""
        tables = self._tables
        in_graph = capturing(gradients[0].device)
        if tables is None or in_graph:
            tables = Tables(gradients, self._bounds)
            if in_graph:
                # A graph has tables of its own: what it reads must never change.
                self._captured.append(tables)
            else:
                self._tables = tables
        tables.point(gradients)
        return tables
