# SPDX-License-Identifier: Apache-2.0
"""Where the Triton kernels can be used: one predicate, and the only late import.

Importing Triton after TensorFlow ends the process, and machines without a GPU need none
of it. Where a GPU's gradients take the slower way for such a reason, a warning says so
once and names what to do.
"""

import importlib.util
import sys
import warnings
from typing import Any

import torch

_KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def available(device: Any) -> bool:
    """Whether the kernels run on a device in this process."""
    if device.type == "cpu":
        return interpreted()
    if device.type != "cuda":
        return False
    reason = _missing()
    if reason and not _warned:
        _warned.append(reason)
        message = (
            f"Gradients on {device} are read by torch's operations instead of "
            f"lossscale's kernels, which is slower: {reason}"
        )
        warnings.warn(message, stacklevel=2)
    return not reason


def reaches(gradient: Any) -> bool:
    """Whether the kernels can read a plain gradient: dense, real, without gaps."""
    return (
        available(gradient.device)
        and gradient.layout is torch.strided
        and gradient.dtype in _KINDS
        and _is_dense(gradient)
        # A view that is to be conjugated or negated when it is read.
        and not gradient.is_neg()
    )


def launcher(captured: list[Any], bounds: list[float]) -> Any:
    """Return the kernels' side of a group of gradients.

    Args:
        captured: Where to keep what a CUDA graph will read.
        bounds: What each of them may be once unscaled.
    """
    from lossscale.torch.kernels.launch import Launcher  # noqa: PLC0415

    return Launcher(captured, bounds)


def interpreted() -> bool:
    """Whether Triton's interpreter was chosen, which runs the kernels on a CPU."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def _missing() -> str:
    """Return why the kernels cannot be used; nothing if they can."""
    if "triton" in sys.modules:
        return ""
    if "tensorflow" in sys.modules:
        return (
            "importing Triton after TensorFlow would end the process. Import triton "
            "before tensorflow."
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed. Install it with: pip install triton"
    return ""


def _is_dense(gradient: Any) -> bool:
    """Whether a tensor's numbers fill a stretch of memory, in any order."""
    if gradient.is_contiguous():
        return True
    expected = 1
    pairs = sorted(
        (stride, size)
        for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
        if size != 1
    )
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True


_warned: list[str] = []
