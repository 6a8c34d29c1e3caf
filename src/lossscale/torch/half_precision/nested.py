# SPDX-License-Identifier: Apache-2.0
"""Casts of the tensors inside tuples, lists, dictionaries, dataclasses and the like.

Nothing is written to what the caller has: what contains a tensor that is cast is
copied, and the rest is passed on as it is. A module may therefore still append to a
list that it was given. A tensor that occurs twice is cast once: torch's attention asks
whether query and key are the same tensor.
"""

import copy
import dataclasses
from collections.abc import Collection, MutableMapping
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


def cast_nested(
    value: Any, sources: Collection[torch.dtype], target: torch.dtype
) -> Any:
    """Return nested values with the tensors of some dtypes in another one.

    Args:
        value: A tensor, what torch's pytree knows, a mapping, a dataclass or a
            `SimpleNamespace`; objects of other classes are returned as they are.
        sources: The dtypes that are cast.
        target: The dtype that they are cast to.
    """
    return _NestedCast(sources, target).cast(value, ())


_ATOMS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.nn.Module)


class _NestedCast:
    """One cast of nested values."""

    def __init__(self, sources: Collection[torch.dtype], target: torch.dtype) -> None:
        self._sources, self._target = sources, target
        self._results: dict[int, torch.Tensor] = {}
        # The number of casts says whether a child was cast: the compiler cannot trace
        # whether two tuples are the same one.
        self._casts = 0

    def cast(self, value: Any, parents: tuple[int, ...]) -> Any:
        """Return a value with its tensors cast.

        Args:
            value: The value.
            parents: The identities of the objects that contain it, each of which is
                visited once.
        """
        if isinstance(value, torch.Tensor):
            return self._cast_tensor(value)
        if isinstance(value, _ATOMS) or id(value) in parents:
            return value
        parents = (*parents, id(value))
        before = self._casts
        kind = type(value)
        if kind is tuple or kind is list:  # pytree's way takes longer
            result = kind([self.cast(child, parents) for child in value])
        elif kind is dict:
            result = {key: self.cast(child, parents) for key, child in value.items()}
        else:
            children, structure = _flatten_once(value)
            if structure.is_leaf():  # torch's pytree does not know it
                return self._cast_fields(value, parents)
            children = [self.cast(child, parents) for child in children]
            result = value
            if self._casts > before:
                result = tree_unflatten(children, structure)
        return result if self._casts > before else value

    def _cast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in self._sources or tensor.dtype == self._target:
            return tensor
        self._casts += 1
        result = self._results.get(id(tensor))
        if result is None:
            result = self._results[id(tensor)] = tensor.to(self._target)
        return result

    def _cast_fields(self, value: Any, parents: tuple[int, ...]) -> Any:
        """Return a mapping, dataclass or namespace with its tensors cast."""
        changed = {}
        for name, old in _fields(value).items():
            before = self._casts
            new = self.cast(old, parents)
            if self._casts > before:
                changed[name] = new
        if not changed:
            return value
        result = copy.copy(value)  # dataclasses.replace would call __post_init__ again
        for name, new in changed.items():
            if isinstance(result, MutableMapping):
                result[name] = new
            else:
                object.__setattr__(result, name, new)  # a frozen dataclass as well
        return result


def _flatten_once(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return what a value of torch's pytree contains, and how to make one again."""
    visited = count()
    # The compiler cannot trace a comparison with the value itself.
    return tree_flatten(value, is_leaf=lambda _: next(visited) > 0)


def _fields(value: Any) -> dict[Any, Any]:
    """Return what a mapping, dataclass or namespace contains."""
    if isinstance(value, MutableMapping):
        return dict(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name, None) for name in names}
    if isinstance(value, SimpleNamespace):
        return dict(vars(value))
    return {}
