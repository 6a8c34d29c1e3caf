# SPDX-License-Identifier: Apache-2.0
"""What an operator's schema says: what it writes to, and what its results are."""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from lossscale.torch.torch_internals import is_mutable

if TYPE_CHECKING:
    from collections.abc import Sequence

Arguments: TypeAlias = tuple[Any, ...]


def copy_written(
    func: Any, args: Arguments, kwargs: dict[str, Any]
) -> tuple[Arguments, dict[str, Any]]:
    """Return the arguments of an operator, with copies of what it will write to."""
    written = {id(tensor) for tensor in written_tensors(func, args, kwargs)}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if id(tensor) in written else tensor

    copied: tuple[Arguments, dict[str, Any]]
    copied = tree_map_only(torch.Tensor, copy, (args, kwargs))
    return copied


def written_tensors(
    func: Any, args: Arguments, kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to."""
    tensors: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[index] if index < len(args) else None)
        tensors += tensors_in(value)
    return tensors


def has_known_results(func: Any) -> bool:
    """Whether the results of an operator have nothing to say.

    They are not written yet, or they are views of what is known already.
    """
    name = str(func._schema.name).rpartition("::")[2]  # noqa: SLF001
    if name in _UNWRITTEN:
        return True
    if name == "lift_fresh" or is_mutable(func):
        return False
    returns: Sequence[Any] = func._schema.returns  # noqa: SLF001
    return bool(returns) and all(result.alias_info is not None for result in returns)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested values."""
    flat, _ = tree_flatten(values)
    return [value for value in flat if isinstance(value, torch.Tensor)]


_UNWRITTEN = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    }
)
