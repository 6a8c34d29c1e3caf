# SPDX-License-Identifier: Apache-2.0
"""What is done for every tensor at every step, in C.

With two thousand parameters, reading `.grad` and comparing addresses takes Python a
millisecond a step, more than the kernels take. `native.c` does it in a fifth of that.
It is built at its first use, in less than a second, by the builder with which Triton
builds its own launchers, and kept in Triton's cache. Where that fails Python does the
same, and a warning says so once.
"""

import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Protocol, cast, overload

import torch

SAME, MOVED, CHANGED = 0, 1, 2
"""What `NativeCode.compare` returns."""


class NativeCode(Protocol):
    """The functions of `native.c`."""

    @overload
    def read_grads(
        self, params: Sequence[torch.Tensor], keeps_none: Literal[False], /
    ) -> list[torch.Tensor]: ...
    @overload
    def read_grads(
        self, params: Sequence[torch.Tensor], keeps_none: Literal[True], /
    ) -> list[torch.Tensor | None]: ...
    def read_grads(self, params: Sequence[torch.Tensor], keeps_none: bool, /) -> Any:
        """Return `.grad` of every parameter, or of every one that has a gradient."""
        ...

    def record(self, tensors: Sequence[torch.Tensor | None], /) -> bytes:
        """Return where tensors of a list or a tuple are and how they are laid out.

        Raises:
            RuntimeError: If one of them is sparse, or otherwise has no address.
        """
        ...

    def compare(self, tensors: Sequence[torch.Tensor | None], record: bytes, /) -> int:
        """Compare tensors with what `record` has returned for others.

        Returns:
            `SAME`; `MOVED` if types, dtypes, devices, shapes and strides are the same
            and an address is not; or `CHANGED`.
        """
        ...

    def compare_grads(self, params: Sequence[torch.Tensor], record: bytes, /) -> int:
        """Compare `.grad` of every parameter in the same way."""
        ...

    def launch(
        self,
        driver: int,
        function: int,
        programs: int,
        threads: int,
        shared: int,
        stream: int,
        codes: bytes,
        arguments: tuple[object, ...],
        /,
    ) -> int:
        """Launch a kernel.

        Args:
            driver: The address of the driver's `cuLaunchKernel`.
            function: The kernel's.
            programs: How many programs there are.
            threads: How many threads each of them has.
            shared: How many bytes of shared memory each of them has.
            stream: The stream.
            codes: A character for each argument: P for a pointer (a tensor or an
                address), i and q for integers, f and d for numbers, of 32 and 64 bits
                each; x for what was compiled into the kernel.
            arguments: The arguments.

        Returns:
            The driver's status; 0 if the kernel was launched.
        """
        ...


def read_grads(params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return `.grad` of parameters, by `native.c` if it was loaded."""
    if code is not None:
        return code.read_grads(params, True)
    return list(map(_grad_of, params))


_grad_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")

code: NativeCode | None = None
"""The functions of `native.c`, once they are loaded."""

_has_tried = False


def load() -> NativeCode | None:
    """Return the functions of `native.c`, built if need be; `None` if they cannot be.

    Imports Triton: call it only where kernels can run (`kernel_backend.is_usable`).
    """
    global code, _has_tried  # noqa: PLW0603  # read at every step
    if not _has_tried:
        _has_tried = True
        try:
            code = _build()
        except Exception as error:  # noqa: BLE001  # of compilers, loaders and versions
            message = (
                "lossscale's C code could not be built, so that steps with many "
                f"parameters take longer ({type(error).__name__}: {error}). It needs "
                "what Triton needs as well: a C compiler, and the headers of Python."
            )
            warnings.warn(message, stacklevel=2)
    return code


def _build() -> NativeCode:
    from triton.runtime.build import compile_module_from_src  # noqa: PLC0415

    source = Path(__file__).with_name("native.c").read_text(encoding="utf-8")
    headers = str(Path(torch.__file__).parent / "include")
    module = compile_module_from_src(source, "lossscale_native", include_dirs=[headers])
    module.connect(
        torch.Tensor.__dlpack_c_exchange_api__,
        torch.Tensor.grad,
        (torch.nn.Parameter, torch.Tensor),
    )
    return cast("NativeCode", module)
