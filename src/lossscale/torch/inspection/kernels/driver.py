# SPDX-License-Identifier: Apache-2.0
"""`DriverLaunch`: launches a compiled kernel by CUDA's driver itself.

Triton's own launch converts every argument again, in Python and in C, which takes
several times as long as the driver needs. The driver is given the addresses of the
arguments: here these stay the same, and a launch writes the arguments to them.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import Any

_CODES = {"i32": "i4x", "i64": "q", "fp32": "f4x", "fp64": "d"}
"""How arguments of 8 bytes each are written, by Triton's name of their type."""

_SCRATCH = 2
"""After its own arguments a kernel has up to so many pointers to memory that Triton
allocates; the kernels here need none."""


class ArgumentBlock:
    """The arguments of a kernel in memory, and the addresses that the driver reads."""

    def __init__(self, types: Sequence[str]) -> None:
        """Allocate memory for arguments.

        Args:
            types: Triton's names of their types, such as "*fp32" and "i32";
                "constexpr" for what was compiled into the kernel.
        """
        runtime_arguments = [
            index for index, kind in enumerate(types) if kind != "constexpr"
        ]
        self._runtime_arguments = (
            runtime_arguments if len(runtime_arguments) < len(types) else None
        )
        codes = [
            "Q" if types[index][0] == "*" else _CODES[types[index]]
            for index in runtime_arguments
        ]
        self._layout = Struct("<" + "".join(codes))
        slots = len(runtime_arguments) + _SCRATCH
        self._memory = ctypes.create_string_buffer(8 * slots)
        first = ctypes.addressof(self._memory)
        self.pointers = (ctypes.c_void_p * slots)(*range(first, first + 8 * slots, 8))

    def write(self, arguments: Sequence[object]) -> None:
        """Write addresses and numbers."""
        if self._runtime_arguments is not None:
            arguments = [arguments[index] for index in self._runtime_arguments]
        self._layout.pack_into(self._memory, 0, *arguments)


class DriverLaunch:
    """A compiled kernel with its arguments.

    Not for several threads at a time, as the optimizers and scalers that launch are
    not either.
    """

    def __init__(self, compiled: Any, types: Sequence[str], launch: Any) -> None:
        """Prepare what is the same at every launch.

        Args:
            compiled: Triton's compiled kernel.
            types: The types of its arguments, without the compile-time constants.
            launch: The driver's function.
        """
        self._block = ArgumentBlock(types)
        self._call = launch
        one, threads = ctypes.c_uint(1), 32 * compiled.metadata.num_warps
        self._function = ctypes.c_void_p(compiled.function)
        self._shape = one, one, ctypes.c_uint(threads), one, one
        self._shared = ctypes.c_uint(compiled.metadata.shared)
        self._stream = 0
        self._stream_argument = ctypes.c_void_p(0)

    def launch(self, programs: int, stream: int, arguments: Sequence[object]) -> bool:
        """Launch the kernel on a stream; whether the driver has accepted it."""
        self._block.write(arguments)
        if stream != self._stream:
            self._stream, self._stream_argument = stream, ctypes.c_void_p(stream)
        status: int = self._call(
            self._function,
            programs,
            *self._shape,
            self._shared,
            self._stream_argument,
            self._block.pointers,
            None,
        )
        return status == 0


def prepare_launch(compiled: Any, count: int) -> DriverLaunch | None:
    """Return a launch by the driver; `None` where that is not possible.

    Args:
        compiled: Triton's compiled kernel.
        count: How many arguments it has before its compile-time constants.
    """
    try:
        metadata = compiled.metadata
        types = list(compiled.src.signature.values())[:count]
        is_plain = (
            metadata.target.backend == "cuda"
            and metadata.num_ctas == 1
            and not metadata.launch_cooperative_grid
            and not metadata.launch_pdl
            and not metadata.global_scratch_size
            and not metadata.profile_scratch_size
            # A sanitizer adds arguments of its own.
            and not getattr(compiled.run, "gsan_enabled", False)
        )
        launch = _find_launch()
        if launch is None or not is_plain:
            return None
        return DriverLaunch(compiled, types, launch)
    except (AttributeError, KeyError):  # another version of Triton
        return None


@cache
def _find_launch() -> Any:
    """Return the driver's function that launches; `None` if there is none."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name).cuLaunchKernel
    except (OSError, AttributeError):
        return None
