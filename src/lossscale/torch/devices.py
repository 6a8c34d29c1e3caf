# SPDX-License-Identifier: Apache-2.0
"""What is asked of the current device and its stream, of any device."""

from contextlib import nullcontext
from typing import Any

import torch


def on(device: Any) -> Any:
    """Return a context in which a device is the current one; Triton launches there."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def capturing(device: Any) -> bool:
    """Whether the current stream of a device is being captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    with on(device):
        return bool(torch.cuda.is_current_stream_capturing())
