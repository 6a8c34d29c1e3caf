# SPDX-License-Identifier: Apache-2.0
"""`DriverLaunch`: launches a compiled kernel by CUDA's driver itself.

Triton's own launch converts every argument again, in Python and in C, which takes
several times as long as the driver needs.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from lossscale.torch import native

_CODES = {"i32": "i", "i64": "q", "fp32": "f", "fp64": "d", "constexpr": "x"}
"""The character for a type in `native.NativeCode.launch`, by Triton's name of it."""


class DriverLaunch:
    """A compiled kernel that the driver launches."""

    def __init__(
        self, compiled: Any, types: Sequence[str], code: native.NativeCode, driver: int
    ) -> None:
        """Prepare what is the same at every launch.

        Args:
            compiled: Triton's compiled kernel.
            types: Triton's names of the types of its arguments, such as "*fp32".
            code: What launches.
            driver: The address of the driver's function.
        """
        self._launch = code.launch
        self._driver, self._function = driver, compiled.function
        self._threads = 32 * compiled.metadata.num_warps
        self._shared = compiled.metadata.shared
        codes = ["P" if name[0] == "*" else _CODES[name] for name in types]
        self._codes = "".join(codes).encode()

    def launch(self, programs: int, stream: int, arguments: tuple[object, ...]) -> bool:
        """Launch the kernel on a stream; whether the driver has accepted it."""
        status = self._launch(
            self._driver,
            self._function,
            programs,
            self._threads,
            self._shared,
            stream,
            self._codes,
            arguments,
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
        code, driver = native.load(), _find_driver()
        if code is None or driver is None or not is_plain:
            return None
        return DriverLaunch(compiled, types, code, driver)
    except (AttributeError, KeyError):  # another version of Triton
        return None


@cache
def _find_driver() -> int | None:
    """Return the address of the driver's function that launches, if there is one."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        function = ctypes.CDLL(name).cuLaunchKernel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
