# SPDX-License-Identifier: Apache-2.0
"""One gradient of any kind that torch has: dense or sparse, real or complex.

A sparse gradient stays sparse: what is done to it is done to its values. Entries that
stand more than once are added up first, in float32 or wider, because optimizers add
them too and the sum may overflow. A complex number counts as its two parts. Anything
that is not floating-point is a `GradientError` that names its path.
"""

import math
from typing import Any, TypeGuard

import torch

from lossscale.errors import GradientError
from lossscale.torch.torch_internals import uncoalesced_values

_NARROW = (torch.float16, torch.bfloat16)
_FLOATS = (*_NARROW, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_LAYOUTS = (torch.strided, torch.sparse_coo)


def check(path: str, leaf: object) -> torch.Tensor:
    """Return a leaf if it is a gradient that can be unscaled, or raise."""
    if _is_tensor_of(leaf, (*_FLOATS, *_COMPLEX), _LAYOUTS):
        return leaf
    message = (
        f"The gradient{' at ' + path if path else ''} is {_kind(leaf)}, expected a "
        "float16, bfloat16, float32, float64 or complex tensor, dense or sparse COO. "
        "Leave out what is not differentiated, or put None in its place."
    )
    raise GradientError(message)


def check_loss(path: str, leaf: object) -> torch.Tensor:
    """Return a leaf if it is a loss that can be scaled, or raise."""
    if _is_tensor_of(leaf, _FLOATS, (torch.strided,)):
        return leaf
    message = (
        f"The loss{' at ' + path if path else ''} is {_kind(leaf)}, expected a "
        "float16, bfloat16, float32 or float64 tensor."
    )
    raise GradientError(message)


def _is_tensor_of(
    leaf: object, dtypes: tuple[torch.dtype, ...], layouts: tuple[torch.layout, ...]
) -> TypeGuard[torch.Tensor]:
    """Whether a leaf is a tensor of one of the dtypes and one of the layouts."""
    if not isinstance(leaf, torch.Tensor):
        return False
    return leaf.dtype in dtypes and leaf.layout in layouts


def _kind(leaf: Any) -> str:
    """Say what something is that should be a gradient, in a few words."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    return str(leaf.dtype if leaf.layout in _LAYOUTS else leaf.layout)


def upcast(leaf: torch.Tensor) -> torch.Tensor:
    """Return a gradient in float32 if it is narrower, else as it is."""
    if leaf.dtype in _NARROW:
        return leaf.to(torch.float32)
    return leaf.to(torch.complex64) if leaf.dtype is torch.complex32 else leaf


def coalesce(leaf: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient with every index once; on a GPU this waits for it."""
    return leaf.coalesce() if leaf.layout is torch.sparse_coo else leaf


def values(leaf: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient as one dense real tensor, without a graph."""
    numbers = leaf.detach()
    if leaf.layout is torch.sparse_coo:
        numbers = uncoalesced_values(numbers)
    if leaf.is_complex():
        return torch.view_as_real(numbers.resolve_conj())
    return numbers.resolve_neg()


def multiply(leaf: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return a gradient times a real factor, in the gradient's dtype."""
    if leaf.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            leaf.indices(),
            multiply(leaf.values(), factor),
            leaf.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    if leaf.is_complex():
        # torch multiplies by factor + 0j, and infinity times 0 is NaN.
        components = torch.view_as_real(leaf.resolve_conj())
        return torch.view_as_complex(multiply(components, factor))
    # A number on the CPU goes to a kernel by value; a copy would cost more.
    is_number = factor.device.type == "cpu" and not factor.shape
    near = factor if is_number else move(factor, leaf.device)
    return leaf * near.to(leaf.dtype)


def is_finite(leaf: torch.Tensor, largest: float = math.inf) -> torch.Tensor:
    """Return whether no number of a gradient is NaN, infinite or beyond `largest`."""
    return is_within(leaf, largest)[0]


def is_within(leaf: torch.Tensor, *bounds: float) -> list[torch.Tensor]:
    """Return for each bound whether the gradient is finite and within it."""
    numbers = values(leaf)
    if numbers.numel() == 0:
        return [torch.ones((), dtype=torch.bool, device=leaf.device)] * len(bounds)
    # One pass and nothing in between: twenty times faster than isfinite().all() on a
    # CPU. NaN comes through, and fails both comparisons.
    low, high = torch.aminmax(numbers)
    largest = [min(limit, torch.finfo(numbers.dtype).max) for limit in bounds]
    # In float32, where the bound is not rounded.
    return [(upcast(low) >= -bound) & (upcast(high) <= bound) for bound in largest]


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; only the way back to the CPU waits."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def common_device(tensors: list[torch.Tensor], fallback: torch.device) -> torch.device:
    """Return where to bring numbers together: on a GPU if any tensor is on one."""
    devices = [tensor.device for tensor in tensors]
    accelerators = [device for device in devices if device.type != "cpu"]
    return [*accelerators, *devices, fallback][0]
