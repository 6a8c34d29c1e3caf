# SPDX-License-Identifier: Apache-2.0
"""Devices: the current one, graph capture, copies to the host, `torch.compile`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from lossscale.torch.torch_internals import (
    current_cuda_device,
    current_raw_stream,
    disable_dynamo,
    is_stream_capturing,
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a device is the current one; Triton launches there."""
    if device.type != "cuda" or device.index == current_cuda_device():
        return _NO_CONTEXT
    return torch.cuda.device(device)


_NO_CONTEXT = nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index == current_cuda_device():
        return is_stream_capturing()
    with torch.cuda.device(device):
        return is_stream_capturing()


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a CUDA device: of each, always the same object."""
    if current_raw_stream is None:
        return torch.cuda.current_stream(device)
    key = device.index, current_raw_stream(device.index)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
"""By device and address."""


def send_to_host(
    numbers: torch.Tensor,
) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start a copy to the host; return it, and the event that says it has arrived."""
    if numbers.device.type != "cuda":
        return numbers.cpu(), None
    # torch keeps pinned memory for the next time: only the first copy allocates it.
    copy = torch.empty(
        numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
    )
    copy.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(numbers.device))
    return copy, event


def disable_compile(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a method that `torch.compile` calls instead of tracing it.

    Inspecting gradients and updating the scale run between compiled parts, as torch's
    optimizers do: traced, they would be guesses about pointers, and Python numbers that
    are baked in. Code that is not compiled pays one function call for this.
    """
    hidden: Callable[Arguments, Result] = disable_dynamo(method)

    @wraps(method)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        call = hidden if torch.compiler.is_compiling() else method
        return call(*args, **kwargs)

    return run
