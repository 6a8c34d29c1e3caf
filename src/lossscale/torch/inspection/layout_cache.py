# SPDX-License-Identifier: Apache-2.0
"""Whether a list of tensors is laid out as an earlier one was, asked at every step.

With two thousand gradients, reading one attribute of each costs a tenth of a
millisecond, as much as reading small gradients does. torch's compiler has a guard in
C++ that compares type, dtype, device, shape and strides of all of them at once. It is
not public, so it is tried before it is trusted, and there is a slower way without it.
"""

from typing import Protocol

import torch

from lossscale.torch import torch_internals


class Layout(Protocol):
    """Recognizes lists of tensors of one layout."""

    def check(self, *tensors: torch.Tensor) -> bool:
        """Whether tensors have this layout."""
        ...


def layout_of(tensors: list[torch.Tensor]) -> Layout:
    """Return what recognizes lists of tensors that are laid out as these are."""
    guard = _guard_class()
    has_duplicates = len({id(tensor) for tensor in tensors}) < len(tensors)
    all_strided = all(tensor.layout is torch.strided for tensor in tensors)
    # The guard wants strided tensors, all of them different.
    if guard is None or has_duplicates or not all_strided:
        return _Fingerprint(tensors)
    return _make_guard(guard, tensors)


class _Fingerprint:
    """The same as torch's guard, in Python."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._fingerprint = self._fingerprint_of(tensors)

    def check(self, *tensors: torch.Tensor) -> bool:
        """Whether tensors have this layout."""
        return self._fingerprint == self._fingerprint_of(tensors)

    @staticmethod
    def _fingerprint_of(
        tensors: list[torch.Tensor] | tuple[torch.Tensor, ...],
    ) -> list[object]:
        return [
            (
                type(tensor),
                tensor.layout,
                tensor.dtype,
                tensor.device,
                tensor.shape,
                tensor.stride() if tensor.layout is torch.strided else None,
            )
            for tensor in tensors
        ]


class _GuardClass(Protocol):
    """torch's guard; `torch._C` has no types for it."""

    def __call__(
        self,
        *tensors: torch.Tensor,
        dynamic_dims_sizes: list[list[int]],
        dynamic_dims_strides: list[list[int]],
    ) -> Layout: ...


def _make_guard(guard: _GuardClass, tensors: list[torch.Tensor]) -> Layout:
    return guard(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )


def _guard_class() -> _GuardClass | None:
    """Return torch's guard class if it is there and works as expected."""
    if not _tried:
        _tried.append(_try_guard())
    return _tried[0]


_tried: list[_GuardClass | None] = []


def _try_guard() -> _GuardClass | None:
    """Return torch's guard class, or `None` if it misses a difference."""
    guard_class = torch_internals.guard_class()
    if guard_class is None:
        return None
    square = torch.zeros(2, 3, device="cpu")
    guard = _make_guard(guard_class, [square])
    different = (
        torch.zeros(3, 2, device="cpu"),
        torch.zeros(3, 2, device="cpu").t(),
        torch.zeros(6, device="cpu"),
        square.half(),
        square.to_sparse(),
        torch.zeros(2, 3, device="meta"),
        torch.nn.Parameter(square),
    )
    if guard.check(torch.ones(2, 3, device="cpu")) and not any(
        map(guard.check, different)
    ):
        return guard_class
    return None
