# SPDX-License-Identifier: Apache-2.0
"""What an operator's schema says: what it writes to, and what its results are."""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from lossscale.torch.explain.kinds import address_of
from lossscale.torch.torch_internals import is_mutable

if TYPE_CHECKING:
    from collections.abc import Sequence

Arguments: TypeAlias = tuple[Any, ...]


class Inputs(NamedTuple):
    """What an operator was called with, before it wrote anything."""

    args: Arguments
    kwargs: dict[str, Any]
    addresses: dict[int, int | None]
    """The addresses of tensors that were copied, by the ids of the copies."""
    unread: frozenset[int]
    """The ids of tensors that the operator writes to without reading them."""

    def read_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the result is made of."""
        tensors = tensors_in((self.args, self.kwargs))
        return [tensor for tensor in tensors if id(tensor) not in self.unread]

    def address_of(self, tensor: torch.Tensor) -> int | None:
        """Return where a tensor was when the operator read it."""
        if id(tensor) in self.addresses:
            return self.addresses[id(tensor)]
        return address_of(tensor)


def keep_inputs(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Inputs:
    """Return the inputs of an operator, with copies of what it will write to."""
    if not is_mutable(func):
        return Inputs(args, kwargs, {}, _find_unread(func, args, kwargs))
    written = {id(tensor) for tensor in written_tensors(func, args, kwargs)}
    addresses: dict[int, int | None] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in written:
            return tensor
        copied = tensor.clone()
        addresses[id(copied)] = address_of(tensor)
        return copied

    args, kwargs = tree_map_only(torch.Tensor, copy, (args, kwargs))
    return Inputs(args, kwargs, addresses, _find_unread(func, args, kwargs))


def _find_unread(func: Any, args: Arguments, kwargs: dict[str, Any]) -> frozenset[int]:
    """Return the ids of what an operator overwrites without reading it."""
    name = _name_of(func)
    if name in _OVERWRITING:
        return frozenset(map(id, tensors_in(args[_OVERWRITING[name]])))
    outputs = [
        kwargs[argument.name]
        for argument in func._schema.arguments  # noqa: SLF001
        if argument.is_out and argument.name in kwargs
    ]
    return frozenset(map(id, tensors_in(outputs)))


def written_tensors(
    func: Any, args: Arguments, kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[index] if index < len(args) else None)
        found += tensors_in(value)
    return found


def collective_inputs(
    func: Any, args: Arguments, kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that a collective reads."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if not argument.name.startswith("out"):
            position = args[index] if index < len(args) else None
            found += tensors_in(kwargs.get(argument.name, position))
    return found


def is_allocation(func: Any) -> bool:
    """Whether the results of an operator are memory that is not written yet."""
    return _name_of(func) in _ALLOCATING


def has_known_results(func: Any) -> bool:
    """Whether the results of an operator are views of what is known already."""
    name = _name_of(func)
    if name in ("resize_", "set_"):
        return True
    if name == "lift_fresh" or is_mutable(func):
        return False
    returns: Sequence[Any] = func._schema.returns  # noqa: SLF001
    return bool(returns) and all(one.alias_info is not None for one in returns)


def _name_of(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]  # noqa: SLF001


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested values."""
    flat, _ = tree_flatten(values)
    return [value for value in flat if isinstance(value, torch.Tensor)]


_OVERWRITING = {"copy_": 0, "fill_": 0, "zero_": 0, "all_gather_copy_in": 1}
"""Operators that write to all of an argument and read none of it, by its position."""

_ALLOCATING = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
    }
)
