# SPDX-License-Identifier: Apache-2.0
"""Launching the kernels: tables, launches, and nothing that waits for the device.

Which chunk belongs to which tensor is the same as long as the shapes are, and is kept
in `Tables`. The addresses of the gradients are compared at every step and copied only
when they changed, because a backward pass may allocate gradients again.
"""

import ctypes
import math
from array import array
from collections.abc import Callable, Iterable
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from lossscale.torch.devices import device_context, is_capturing
from lossscale.torch.inspection.buffer_pools import DevicePool, PinnedPool
from lossscale.torch.inspection.kernels import read, summarize
from lossscale.torch.inspection.kernels.driver import prepare_launch
from lossscale.torch.inspection.request import LIMITS, InspectionRequest
from lossscale.torch.inspection.summary import HEADER
from lossscale.torch.torch_internals import (
    current_cuda_device,
    current_raw_stream,
)

Kernel: TypeAlias = Any
"""A function decorated by `triton.jit`; Triton has no public type for it."""

KINDS = {
    torch.float32: (0, tl.float32),
    torch.float16: (1, tl.float16),
    torch.bfloat16: (2, tl.bfloat16),
    torch.float64: (3, tl.float64),
}
"""The kernels' number of a dtype, and Triton's name of it."""

BLOCK = 4096
"""How many elements a program takes at a time."""
LOOPS = 8
"""How many blocks make a chunk."""
WARPS = 4


class KernelVariant:
    """A kernel with its compile-time constants, launched again and again.

    Finding the compiled kernel that fits costs Triton more than launching it: it looks
    at the alignment of tensors and at integers. Here these are always the same. Tensors
    that do change are newly allocated, which is aligned, or are read one number at a
    time, where alignment does not matter.
    """

    def __init__(
        self,
        kernel: Kernel,
        constants: tuple[object, ...],
        *,
        fuses: bool = True,
        warps: int = WARPS,
    ) -> None:
        """Prepare a kernel; its first launch compiles it.

        Args:
            kernel: The kernel.
            constants: The compile-time constants that come after its arguments.
            fuses: Whether a product and a sum may be rounded once instead of twice.
            warps: How many warps a program has.
        """
        self._kernel, self._constants = kernel, constants
        self._fuses, self._warps = fuses, warps
        self._compiled: CompiledKernel | None = None

    def launch(self, programs: int, arguments: tuple[object, ...]) -> None:
        """Launch the kernel on the current stream of the current device.

        Args:
            programs: The size of the grid.
            arguments: Tensors and numbers, in the kernel's order.
        """
        if self._compiled is not None:
            self._compiled.launch(programs, arguments, self._constants)
            return
        result = self._kernel[(programs,)](
            *arguments,
            *self._constants,
            num_warps=self._warps,
            enable_fp_fusion=self._fuses,
        )
        if result is not None:  # the interpreter compiles nothing
            self._compiled = CompiledKernel(result, len(arguments))


class KernelLauncher:
    """Launches kernels on the same tensors, in one variant or another."""

    def __init__(self) -> None:
        self._variants: dict[tuple[object, ...], KernelVariant] = {}

    def launch(
        self,
        kernel: Kernel,
        programs: int,
        arguments: tuple[object, ...],
        constants: tuple[object, ...],
        *,
        fuses: bool = True,
    ) -> None:
        """Launch a kernel.

        Args:
            kernel: The kernel.
            programs: The size of the grid.
            arguments: Tensors and numbers, in the kernel's order.
            constants: The compile-time constants that come after them.
            fuses: Whether a product and a sum may be rounded once instead of twice.
        """
        key = (id(kernel), constants)
        variant = self._variants.get(key)
        if variant is None:
            variant = KernelVariant(kernel, constants, fuses=fuses)
            self._variants[key] = variant
        variant.launch(programs, arguments)


class CompiledKernel:
    """A kernel that was compiled and launched once.

    Triton's own launch asks for the device, its stream and the hooks of profilers in
    Python, and of every tensor where it is: several times what the launch itself takes.
    It is left to Triton for a profiler, and where the driver does not accept it: Triton
    then raises with the reason.
    """

    def __init__(self, compiled: Any, count: int) -> None:
        """Prepare the next launches.

        Args:
            compiled: Triton's compiled kernel.
            count: How many arguments it has before its compile-time constants.
        """
        self._compiled = compiled
        self._run: Callable[..., None] = compiled.run
        self._first = compiled.function, compiled.packed_metadata, None, None, None
        self._by_driver = prepare_launch(compiled, count)

    def launch(
        self,
        programs: int,
        arguments: tuple[object, ...],
        constants: tuple[object, ...],
    ) -> None:
        """Launch it on the current stream of the current device."""
        if current_raw_stream is not None and not _is_profiled():
            stream = current_raw_stream(current_cuda_device())
            by_driver = self._by_driver
            if by_driver is None:
                addresses = _addresses_of(arguments)
                self._run(programs, 1, 1, stream, *self._first, *addresses, *constants)
                return
            if by_driver.launch(programs, stream, arguments):
                return
        self._compiled[programs, 1, 1](*_addresses_of(arguments), *constants)


def _addresses_of(arguments: tuple[object, ...]) -> list[object]:
    """Return arguments with the addresses of tensors in their place."""
    return [
        argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
        for argument in arguments
    ]


def _is_profiled() -> bool:
    """Whether a profiler wants to know of launches."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Tables:
    """What the kernels know about one list of tensors as long as its layout stays."""

    def __init__(self, grads: list[torch.Tensor], bounds: list[float]) -> None:
        counts = [grad.numel() for grad in grads]
        dtypes = [grad.dtype for grad in grads]
        self.device = grads[0].device
        self.tensors = len(counts)
        self.is_mixed = len(set(dtypes)) > 1
        self.dtype = KINDS[dtypes[0]][1]
        chunks = [-(-count // (BLOCK * LOOPS)) for count in counts]
        starts = _host(accumulate(chunks, initial=0), torch.int32)
        self.chunks = int(starts[-1])
        chunk_tensors = torch.repeat_interleave(
            _host(range(self.tensors), torch.int32), _host(chunks, torch.int64)
        )
        chunk_numbers = _host(range(self.chunks), torch.int32)
        chunk_numbers = chunk_numbers - starts[chunk_tensors.long()]
        kinds = _host([KINDS[dtype][0] for dtype in dtypes], torch.int32)
        limits = _host([LIMITS[dtype] for dtype in dtypes], torch.float64)
        self._pinned: list[torch.Tensor] = []
        self._address_pool = PinnedPool(torch.int64)
        self._summary_pool = DevicePool(HEADER + self.tensors, self.device)
        # One copy for all. The 8-byte numbers come first, so that all are aligned.
        eight_byte_columns = torch.cat(
            [
                _host(counts, torch.int64),
                limits.view(torch.int64),
                _host(bounds, torch.float64).view(torch.int64),
            ]
        )
        four_byte_columns = torch.cat([starts, kinds, chunk_tensors, chunk_numbers])
        if len(four_byte_columns) % 2:
            four_byte_columns = torch.cat([four_byte_columns, four_byte_columns[:1]])
        table = self._pin(
            torch.cat([eight_byte_columns, four_byte_columns.view(torch.int64)])
        )
        table = table.to(self.device, non_blocking=True)
        self.counts, self.limits, self.bounds = _split(
            table[: 3 * self.tensors], [torch.int64, torch.float64, torch.float64]
        )
        sizes = [self.tensors + 1, self.tensors, self.chunks, self.chunks]
        (self.starts, self.kinds, self.chunk_tensors, self.chunk_numbers, _) = (
            table[3 * self.tensors :]
            .view(torch.int32)
            .split([*sizes, len(four_byte_columns) - sum(sizes)])
        )
        work = torch.empty(
            2 * (self.chunks + self.tensors), dtype=torch.float64, device=self.device
        )
        self.sums, self.amaxes, self.tensor_sums, self.tensor_amaxes = work.split(
            [self.chunks, self.chunks, self.tensors, self.tensors]
        )
        self.finished = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.pointers = torch.empty(self.tensors, dtype=torch.int64, device=self.device)
        self.chunk_arguments = (
            self.pointers,
            self.counts,
            self.kinds,
            self.chunk_tensors,
            self.chunk_numbers,
        )
        """The first arguments of every kernel that reads the gradients."""
        self.is_aligned = False
        self._addresses: list[int] = []
        self._version: int | None = None

    def set_addresses(self, grads: list[torch.Tensor], version: int | None) -> None:
        """Copy the addresses of the gradients to the device if they changed.

        Args:
            grads: The gradients.
            version: What `version_of` says of them.
        """
        old_addresses = self._addresses
        if old_addresses and version is not None and version == self._version:
            return
        self._version = version
        addresses = list(map(torch.Tensor.data_ptr, grads))
        if addresses == old_addresses:
            return
        # Unknown until they are copied: a failure here is retried at the next step.
        self._addresses = []
        numbers = array("q", addresses)
        self.is_aligned = not reduce(or_, addresses) & 15
        if self.device.type == "cpu" or is_capturing(self.device):
            host = self._pin(torch.frombuffer(numbers, dtype=torch.int64))
        else:
            host = self._address_pool.take(self.tensors)
            ctypes.memmove(host.data_ptr(), numbers.buffer_info()[0], 8 * self.tensors)
        self.pointers.copy_(host, non_blocking=True)
        self._addresses = addresses

    def new_summary(self) -> torch.Tensor:
        """Return the buffer of a summary, not filled."""
        if self.device.type == "cpu" or is_capturing(self.device):
            length = HEADER + self.tensors
            return torch.empty(length, dtype=torch.float32, device=self.device)
        return self._summary_pool.take()

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy from which the device can read while the host goes on."""
        if self.device.type == "cpu":
            return tensor
        pinned = tensor.pin_memory()
        if is_capturing(self.device):
            # A graph copies from the same host memory at every replay.
            self._pinned.append(pinned)
        return pinned


def _host(numbers: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers as a tensor of the host, whatever torch's default device is."""
    return torch.tensor(list(numbers), dtype=dtype, device="cpu")


def _split(table: torch.Tensor, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Return equal parts of an int64 table as tensors of 8-byte dtypes."""
    columns = table.split(len(table) // len(dtypes))
    return [column.view(dtype) for column, dtype in zip(columns, dtypes, strict=True)]


class GroupKernels(KernelLauncher):
    """The kernels for one group of gradients whose layout stays."""

    def __init__(self, kept_tables: list[Tables], bounds: list[float]) -> None:
        """Start without tables.

        Args:
            kept_tables: Where to keep the tables that a CUDA graph will read.
            bounds: What each gradient may be once unscaled; see `headroom.py`.
        """
        super().__init__()
        self._tables: Tables | None = None
        self._kept_tables = kept_tables
        self._bounds = bounds
        self._smallest_bound = min(bounds, default=math.inf)

    def set_bounds(self, bounds: list[float]) -> None:
        """Set what each gradient may be once unscaled."""
        self._bounds, self._tables = bounds, None
        self._smallest_bound = min(bounds, default=math.inf)

    def measure(
        self,
        grads: list[torch.Tensor],
        scale: torch.Tensor,
        request: InspectionRequest,
        *,
        inverted: bool,
        version: int | None = None,
    ) -> torch.Tensor:
        """Return the buffer of a summary.

        Args:
            grads: Dense real tensors of one device, always of the same layout.
            scale: The scale that they carry: one float32 number, on that device.
            request: What to measure.
            inverted: Whether `scale` is the inverse.
            version: What `version_of` says of the gradients.
        """
        tables = self._tables_of(grads, version)
        buffer = tables.new_summary()
        with device_context(tables.device):
            if tables.chunks:
                self.launch(
                    read.read,
                    tables.chunks,
                    (*tables.chunk_arguments, scale, tables.sums, tables.amaxes),
                    (
                        tables.dtype,
                        tables.is_mixed,
                        inverted,
                        request.unscale_in_place,
                        tables.is_aligned,
                        BLOCK,
                        LOOPS,
                    ),
                )
            self.launch(
                summarize.summarize,
                tables.tensors,
                (
                    tables.starts,
                    tables.limits,
                    tables.bounds,
                    tables.sums,
                    tables.amaxes,
                    tables.tensor_sums,
                    tables.tensor_amaxes,
                    scale,
                    buffer,
                    tables.finished,
                    tables.tensors,
                    float(request.max_norm),
                ),
                (
                    request.norm_type != math.inf,
                    request.max_norm < math.inf,
                    request.compares_with(self._smallest_bound),
                    request.as_grad_scale,
                    inverted,
                ),
            )
        return buffer

    def multiply_(
        self,
        grads: list[torch.Tensor],
        factor: torch.Tensor,
        version: int | None = None,
    ) -> None:
        """Multiply the gradients by one float32 number of their device, in place.

        Args:
            grads: The gradients.
            factor: The number.
            version: What `version_of` says of the gradients.
        """
        tables = self._tables_of(grads, version)
        if tables.chunks:
            with device_context(tables.device):
                self.launch(
                    read.multiply,
                    tables.chunks,
                    (*tables.chunk_arguments, factor),
                    (tables.dtype, tables.is_mixed, tables.is_aligned, BLOCK, LOOPS),
                )

    def _tables_of(self, grads: list[torch.Tensor], version: int | None) -> Tables:
        """Return the tables, with the present addresses of the gradients."""
        tables = self._tables
        in_graph = is_capturing(grads[0].device)
        if tables is None or in_graph:
            tables = Tables(grads, self._bounds)
            if in_graph:
                # A graph gets tables of its own, which never change.
                self._kept_tables.append(tables)
            else:
                self._tables = tables
        tables.set_addresses(grads, version)
        return tables
