# SPDX-License-Identifier: Apache-2.0
"""`KeptTensors`: the state whose addresses the kernels have, recognized between steps.

Code that moves the state to the host between steps, or resets it, puts other tensors
into `optimizer.state`, or other memory into its tensors. From then on the kernels must
update those. Only code that has read `optimizer.state` can do that, which the
optimizers note (`ScaledOptimizer.state`). After it was read the tensors are compared at
every step, until no other code has any of them. Nothing here holds a tensor: memory
that other code frees is free.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from lossscale.errors import StateError
from lossscale.torch.distributed.dtensor import as_dtensor, local_shard
from lossscale.torch.inspection.layout_cache import Placement
from lossscale.torch.optim.identity import are_identical

State: TypeAlias = Mapping[torch.Tensor, Mapping[str, Any]]
"""The state of an optimizer: what is kept for each parameter, by name."""


class KeptTensors:
    """The tensors that are kept for parameters, at one moment."""

    def __init__(
        self, state: State, params: Iterable[torch.Tensor], names: tuple[str, ...]
    ) -> None:
        """Remember where the tensors are.

        Args:
            state: The state of the optimizer.
            params: The parameters that the kernels update.
            names: What the kernels may read or write of their state.
        """
        self._params = list(state)
        index_of = {id(param): index for index, param in enumerate(self._params)}
        known = [index_of[id(param)] for param in params if id(param) in index_of]
        entries = list(state.values())
        self._columns: list[tuple[itemgetter[str], list[int]]] = []
        """What is kept under each name, and for which entries of the state."""
        for name in names:
            indices = [
                index
                for index in known
                if isinstance(entries[index].get(name), torch.Tensor)
            ]
            if indices:
                self._columns.append((itemgetter(name), indices))
        tensors = self._list(state)
        self._has_shards = any(as_dtensor(tensor) is not None for tensor in tensors)
        self._placement = Placement(self._local(tensors))

    def are_in(self, state: State) -> bool:
        """Whether an optimizer keeps tensors like these, at the same addresses."""
        if not are_identical(list(state), self._params):
            return False
        try:
            tensors = self._list(state)
        except KeyError:
            return False
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return False
        return self._placement.is_same(self._local(tensors))

    def _list(self, state: State) -> list[torch.Tensor]:
        """Return the tensors, name by name."""
        entries = list(state.values())
        tensors: list[torch.Tensor] = []
        for getter, indices in self._columns:
            tensors += map(getter, map(entries.__getitem__, indices))
        return tensors

    def _local(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(map(local_shard, tensors)) if self._has_shards else tensors


def is_held(attributes: Mapping[str, Any]) -> bool:
    """Whether other code has the state of an optimizer, an entry or a tensor of it.

    Args:
        attributes: `vars()` of the optimizer.
    """
    counts = _count_references(attributes)
    return any(
        found > own for found, own in zip(counts, _own_references(), strict=True)
    )


def _count_references(attributes: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return how many references there are: to a state, to an entry and to a tensor."""
    state = attributes["state"]
    entries = list(state.values())
    values = [value for entry in entries for value in entry.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    del values
    return (
        sys.getrefcount(state),
        max(map(sys.getrefcount, entries), default=0),
        max(map(sys.getrefcount, tensors), default=0),
    )


@cache
def _own_references() -> tuple[int, int, int]:
    """Return the same of a state that no other code has; it depends on Python."""
    entries = {index: {"kept": torch.empty(0, device="cpu")} for index in range(2)}
    attributes = {"state": entries}
    del entries
    return _count_references(attributes)


UPDATED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels can update."""


def check_kept_tensor(param: torch.Tensor, name: str, value: torch.Tensor) -> None:
    """Raise unless the kernels can update what is kept for a parameter.

    They would read and write past the end of another shape, and take another dtype for
    their own.
    """
    if value.shape != param.shape:
        problem = f"has the shape {tuple(value.shape)}"
    elif value.dtype not in UPDATED_DTYPES:
        problem = f"is {value.dtype}"
    else:
        return
    message = (
        f"{name} of a parameter of shape {tuple(param.shape)} {problem}; expected that "
        "shape, in float32, float16 or bfloat16. Load the state of this model, or "
        "delete optimizer.state[param] to start again."
    )
    raise StateError(message)
