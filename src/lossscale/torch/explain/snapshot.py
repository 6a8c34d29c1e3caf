# SPDX-License-Identifier: Apache-2.0
"""`Snapshot`: what running a batch changes, saved before and put back after.

Buffers, the random state of torch, Python and NumPy, the gradients of parameters, and
whether modules are in training. Parameters are `WriteGuard`'s.
"""

import random
import sys
from typing import Any, NamedTuple

import torch

from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.distributed.rank_groups import is_running


class _Buffer(NamedTuple):
    """A buffer, where it is, and what it held."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor


class _Gradient(NamedTuple):
    """The gradient of a parameter, and a copy if something else may write to it."""

    param: torch.nn.Parameter
    tensor: torch.Tensor | None
    copy: torch.Tensor | None


class Snapshot:
    """What a model and the random generators were."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._training = [(module, module.training) for module in model.modules()]
        self._buffers = [
            _Buffer(module, name, tensor, local_shard(tensor.detach()).clone())
            for module in model.modules()
            for name, tensor in module._buffers.items()  # noqa: SLF001
            if tensor is not None
        ]
        # DDP, which may be around the model, writes to its buckets again.
        is_shared = is_running()
        self._gradients = [
            _Gradient(
                param,
                param.grad,
                local_shard(param.grad).clone()
                if is_shared and param.grad is not None
                else None,
            )
            for param in model.parameters()
        ]
        self._random = _random_state()

    def begin_run(self) -> None:
        """Drop gradients and rewind the random state: every run starts like this."""
        for gradient in self._gradients:
            gradient.param.grad = None
        _set_random_state(self._random)

    def restore(self) -> None:
        """Put everything back, bit by bit."""
        for module, training in self._training:
            module.training = training
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.module._buffers[buffer.name] = buffer.tensor  # noqa: SLF001
                _put_back(buffer.tensor, buffer.copy)
            for gradient in self._gradients:
                gradient.param.grad = gradient.tensor
                if gradient.tensor is not None and gradient.copy is not None:
                    _put_back(gradient.tensor, gradient.copy)
        _set_random_state(self._random)


def _put_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Write what a tensor held, unless it holds that: its version stays then."""
    local = local_shard(tensor.detach())
    if not _is_same(local, copy):
        local.copy_(copy)


def _is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.shape != copy.shape:
        return False
    if tensor.is_floating_point():
        equal = (tensor == copy) & (torch.signbit(tensor) == torch.signbit(copy))
        return bool((equal | (tensor.isnan() & copy.isnan())).all())
    return bool((tensor == copy).all())


class _RandomState(NamedTuple):
    """The states of the generators that a model may draw from."""

    cpu: torch.Tensor
    devices: dict[str, list[torch.Tensor]]
    python: Any
    numpy: Any


def _random_state() -> _RandomState:
    devices = {}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    return _RandomState(
        torch.get_rng_state(),
        devices,
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def _set_random_state(state: _RandomState) -> None:
    torch.set_rng_state(state.cpu)
    if "cuda" in state.devices:
        torch.cuda.set_rng_state_all(state.devices["cuda"])
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
