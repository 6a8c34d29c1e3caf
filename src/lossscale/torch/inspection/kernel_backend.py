# SPDX-License-Identifier: Apache-2.0
"""Where the Triton kernels can be used: one predicate, and the only late import.

Importing Triton after TensorFlow aborts the process, and machines without a GPU need
none of it. If a GPU's gradients are read by torch's operations for such a reason, a
warning says so once, with what to do about it.
"""

import importlib.util
import sys
import warnings
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lossscale.torch.inspection.kernels.launch import GroupKernels, Tables

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def is_available(device: torch.device) -> bool:
    """Whether the kernels run on a device in this process."""
    if device.type == "cpu":
        return is_interpreted()
    if device.type != "cuda":
        return False
    reason = _reason_against(device)
    if reason and not _warned:
        _warned.append(reason)
        message = (
            f"Gradients on {device} are read by torch's operations instead of "
            f"lossscale's kernels, which is slower: {reason}"
        )
        warnings.warn(message, stacklevel=2)
    return not reason


def is_usable(device: torch.device) -> bool:
    """The same as `is_available`, for code that does not read gradients: no warning."""
    if device.type == "cpu":
        return is_interpreted()
    return device.type == "cuda" and not _reason_against(device)


def can_read(grad: torch.Tensor) -> bool:
    """Whether the kernels can read a plain gradient: dense, real, without gaps."""
    return (
        is_available(grad.device)
        and grad.layout is torch.strided
        and grad.dtype in _DTYPES
        and _has_no_gaps(grad)
        # A view whose elements are negated when they are read.
        and not grad.is_neg()
    )


def make_kernels(kept_tables: "list[Tables]", bounds: list[float]) -> "GroupKernels":
    """Return the kernels for one group of gradients.

    Args:
        kept_tables: Where to keep the tables that a CUDA graph will read.
        bounds: What each gradient may be once unscaled.
    """
    from lossscale.torch.inspection.kernels.launch import GroupKernels  # noqa: PLC0415

    return GroupKernels(kept_tables, bounds)


def is_interpreted() -> bool:
    """Whether Triton's interpreter was chosen, which runs the kernels on a CPU."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


_LEAST_CAPABILITY = (7, 0)
"""Triton compiles for no older GPU."""


@cache
def _capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; of others a sufficient one."""
    if torch.version.cuda is None:
        return _LEAST_CAPABILITY
    return torch.cuda.get_device_capability(device)


def _reason_against(device: torch.device) -> str:
    """Return why the kernels cannot be used; an empty string if they can."""
    capability = _capability_of(device)
    if capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, x)) for x in (capability, _LEAST_CAPABILITY))
        return f"its compute capability is {found}, and Triton needs {least}."
    if "triton" in sys.modules:
        return ""
    if "tensorflow" in sys.modules:
        return (
            "importing Triton after TensorFlow would abort the process. Import triton "
            "before tensorflow."
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed. Install it with: pip install triton"
    return ""


def _has_no_gaps(grad: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory, in any order."""
    if grad.is_contiguous():
        return True
    expected = 1
    pairs = sorted(
        (stride, size)
        for stride, size in zip(grad.stride(), grad.shape, strict=True)
        if size != 1
    )
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True


_warned: list[str] = []
