# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor has NaN or infinities, and where it is. Waits for the device."""

import torch

from lossscale.core.explanation.kinds import Kind
from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.torch_internals import uncoalesced_values


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the numbers of a tensor on this rank; `None` if it has none to check."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return None
    if tensor.device.type == "meta":
        return None
    numbers = local_shard(tensor.detach())
    if numbers.layout is torch.sparse_coo:
        numbers = uncoalesced_values(numbers)
    if numbers.layout is not torch.strided or numbers.is_quantized:
        return None
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    if numbers.element_size() == 1:  # float8, which has hardly any operators
        numbers = numbers.float()
    return numbers if numbers.numel() else None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    numbers = numbers_of(tensor)
    return numbers is None or bool(torch.isfinite(numbers).all())


def kind_of(tensor: torch.Tensor) -> Kind | None:
    """Return what a tensor has that is not finite; `None` if all of it is finite."""
    numbers = numbers_of(tensor)
    if numbers is None or bool(torch.isfinite(numbers).all()):
        return None
    return Kind(
        bool(torch.isnan(numbers).any()),
        bool(torch.isposinf(numbers).any()),
        bool(torch.isneginf(numbers).any()),
    )


def address_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; `None` if it has none."""
    try:
        local = local_shard(tensor.detach())
        if local.layout is torch.sparse_coo:
            local = uncoalesced_values(local)
        return local.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # a wrapper without a storage
        return None


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, rather than a view of a part of it."""
    try:
        local = local_shard(tensor.detach())
        size = local.numel() * local.element_size()
        return size == local.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a wrapper without a storage
        return True
