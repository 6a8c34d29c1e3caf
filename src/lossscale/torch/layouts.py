# SPDX-License-Identifier: Apache-2.0
"""Whether a list of tensors is laid out as an earlier one was, asked every step.

Of two thousand gradients every look at one attribute costs a tenth of a millisecond, as
much as reading small gradients does. torch's compiler has a guard in C++ that looks at
kind, dtype, device, shape and strides of all of them at once. It is no public name, so
it is tried before it is trusted, and there is another way without it.
"""

from typing import Any

import torch


class Layout:
    """How a list of tensors is laid out."""

    def __init__(self, tensors: list[Any]) -> None:
        self._count = len(tensors)
        guard = _guard_class()
        self._guard = None if guard is None else _guarded(guard, tensors)
        self._facts = None if self._guard else _facts(tensors)

    def fits(self, tensors: list[Any]) -> bool:
        """Whether this is the layout of such a list."""
        if len(tensors) != self._count:
            return False
        if self._guard is not None:
            return bool(self._guard.check(*tensors))
        return self._facts == _facts(tensors)


def _facts(tensors: list[Any]) -> list[Any]:
    """Return what a layout consists of, in Python."""
    return [
        (type(t), t.layout, t.dtype, t.device, t.shape, _strides(t)) for t in tensors
    ]


def _strides(tensor: Any) -> Any:
    """Return the strides of a tensor, if it is of a kind that has any."""
    return tensor.stride() if tensor.layout is torch.strided else None


def _guarded(guard: Any, tensors: list[Any]) -> Any:
    """Return torch's guard on a list, or `None` where it takes another view of it."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        return None  # the guard wants them all different
    return guard(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )


def _guard_class() -> Any:
    """Return torch's guard class if it is there and does what is said of it."""
    if not _tried:
        _tried.append(_try_guard())
    return _tried[0]


_tried: list[Any] = []


def _try_guard() -> Any:
    """Return torch's guard class, or `None` if it sees no difference where one is."""
    try:
        from torch._C._dynamo.guards import TensorGuards  # noqa: PLC0415
    except ImportError:
        return None
    square = torch.zeros(2, 3, device="cpu")
    guard = _guarded(TensorGuards, [square])
    others = (
        torch.zeros(3, 2, device="cpu"),
        torch.zeros(3, 2, device="cpu").t(),
        torch.zeros(6, device="cpu"),
        square.half(),
        square.to_sparse(),
        torch.zeros(2, 3, device="meta"),
        torch.nn.Parameter(square),
    )
    if guard.check(torch.ones(2, 3, device="cpu")) and not any(
        map(guard.check, others)
    ):
        return TensorGuards
    return None
