# SPDX-License-Identifier: Apache-2.0
"""Whether a list of tensors is laid out as an earlier one was, asked at every step.

With two thousand gradients, reading one attribute of each costs a tenth of a
millisecond, as much as reading small gradients does. Where kernels run, `native.c`
compares type, dtype, device, shape, strides and address of all of them at once.
Elsewhere torch's compiler has a guard in C++ that compares the same but the address. It
is not public, so it is tested before it is used; where it fails, Python compares.
"""

from collections.abc import Sequence
from itertools import count
from typing import Protocol

import torch

from lossscale.torch import native, torch_internals
from lossscale.torch.inspection import kernel_backend


class Layout(Protocol):
    """Recognizes lists of tensors of one layout."""

    def check(self, *tensors: torch.Tensor) -> bool:
        """Whether tensors have this layout."""
        ...


def version_of(layout: Layout) -> int | None:
    """Return a number for the addresses that tensors had at the last check.

    No other addresses have it, of whatever tensors. `None` if they are not compared.
    """
    return layout.version if isinstance(layout, AddressedLayout) else None


def layout_of(tensors: list[torch.Tensor]) -> Layout:
    """Return what recognizes lists of tensors that are laid out as these are."""
    code = _code_for(tensors)
    if code is not None:
        return AddressedLayout(code, tensors)
    guard = _guard_class()
    has_duplicates = len({id(tensor) for tensor in tensors}) < len(tensors)
    all_strided = all(tensor.layout is torch.strided for tensor in tensors)
    # The guard wants strided tensors, all of them different.
    if guard is None or has_duplicates or not all_strided:
        return _Fingerprint(tensors)
    return _make_guard(guard, tensors)


def _code_for(tensors: list[torch.Tensor]) -> native.NativeCode | None:
    """Return the C code of `native` if it can record tensors."""
    if not tensors or not kernel_backend.is_usable(tensors[0].device):
        return None
    return native.load() if all(map(_is_plain, tensors)) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the C code of `native` sees all of a tensor that matters.

    It does not see the shard of a DTensor, nor whether elements are negated or
    conjugated when they are read. Of a sparse tensor it sees nothing.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


class Placement:
    """Where a list of tensors is, and how it is laid out."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._code = _code_for(tensors)
        if self._code is not None:
            self._record = self._code.record(tensors)
            return
        self._layout = layout_of(tensors)
        self._addresses = _addresses_of(tensors)

    def is_same(self, tensors: list[torch.Tensor]) -> bool:
        """Whether tensors have the layout of the first ones, and their addresses."""
        if self._code is not None:
            return self._code.compare(tensors, self._record) == native.SAME
        return (
            self._layout.check(*tensors) and _addresses_of(tensors) == self._addresses
        )


def _addresses_of(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


_versions = count()


class AddressedLayout:
    """A layout with addresses, which the C code of `native` compares."""

    def __init__(self, code: native.NativeCode, tensors: list[torch.Tensor]) -> None:
        self._code = code
        self._record = code.record(tensors)
        self.version = next(_versions)

    def check(self, *tensors: torch.Tensor) -> bool:
        """Whether tensors have this layout."""
        return self.check_all(tensors)

    def check_all(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors of a list or a tuple have this layout."""
        change = self._code.compare(tensors, self._record)
        if change == native.MOVED:
            self._record = self._code.record(tensors)
            self.version = next(_versions)
        return change != native.CHANGED


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
