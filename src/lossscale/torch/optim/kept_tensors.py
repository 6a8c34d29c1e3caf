# SPDX-License-Identifier: Apache-2.0
"""`KeptTensors`: the state whose addresses the kernels have, recognized between steps.

Code that moves the state to the host between steps, or resets it, puts other tensors
into `optimizer.state`, or other memory into its tensors. From then on the kernels must
update those. To compare thousands of tensors at every step would take most of its time
on the host, so all of them are compared only after other code has read
`optimizer.state` (the optimizers note that), until it holds nothing of it any more. A
few of them are compared at every step, each time others. So a loop that finds the state
in another way, such as by `gc.get_objects()`, and moves all of it is noticed as well; a
single tensor that is moved without `optimizer.state` is not noticed at once.

No tensor of the state is kept alive here: what other code frees is free.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from lossscale.errors import StateError
from lossscale.torch.distributed.dtensor import as_dtensor, local_shard
from lossscale.torch.inspection.layout_cache import Placement
from lossscale.torch.optim.identity import are_identical

State: TypeAlias = Mapping[Any, Any]
"""The state of an optimizer: what is kept for each parameter, by name. Other code may
have put other entries there."""

_SAMPLE = 8
"""How many tensors are compared at every step."""


class Sample(NamedTuple):
    """Some of the tensors."""

    keys: list[tuple[torch.Tensor, str]]
    """Their parameters and names."""
    placement: Placement


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
        self._keys = list(state)
        entries = list(state.values())
        positions = {id(key): position for position, key in enumerate(self._keys)}
        known = [positions[id(param)] for param in params if id(param) in positions]
        self._columns: list[tuple[itemgetter[str], list[int]]] = []
        """What is kept under each name, and for which entries of the state."""
        samples: list[tuple[torch.Tensor, str]] = []
        for name in names:
            column = [
                position
                for position in known
                if isinstance(entries[position].get(name), torch.Tensor)
            ]
            if column:
                self._columns.append((itemgetter(name), column))
            samples += [(self._keys[position], name) for position in column]
        self._placement = Placement(list(map(_local, self._list(state))))
        self._samples = [
            Sample(
                chosen, Placement([_local(state[key][name]) for key, name in chosen])
            )
            for chosen in _split(samples)
        ]
        self._next = 0

    def are_in(self, state: State) -> bool:
        """Whether a state has tensors like these, all of them at the same addresses."""
        if not are_identical(list(state), self._keys):
            return False
        try:
            tensors = self._list(state)
        except (KeyError, TypeError):  # an entry may be anything by now
            return False
        return _are_at(tensors, self._placement)

    def are_sampled_in(self, state: State) -> bool:
        """The same for a few of them, each time others."""
        if not self._samples:
            return True
        self._next = (self._next + 1) % len(self._samples)
        keys, placement = self._samples[self._next]
        try:
            tensors = [state[param][name] for param, name in keys]
        except (KeyError, TypeError):
            return False
        return _are_at(tensors, placement)

    def _list(self, state: State) -> list[torch.Tensor]:
        """Return the tensors, name by name."""
        entries = list(state.values())
        tensors: list[torch.Tensor] = []
        for getter, column in self._columns:
            tensors += map(getter, map(entries.__getitem__, column))
        return tensors


def _split(
    samples: list[tuple[torch.Tensor, str]],
) -> Iterator[list[tuple[torch.Tensor, str]]]:
    """Return what is compared at one step, and at the next."""
    for start in range(0, len(samples), _SAMPLE):
        yield samples[start : start + _SAMPLE]


def _place(state: State, keys: list[tuple[torch.Tensor, str]]) -> Placement:
    return Placement([_local(state[param][name]) for param, name in keys])


def _are_at(tensors: list[torch.Tensor], placement: Placement) -> bool:
    if not {torch.Tensor}.issuperset(map(type, tensors)):
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return False
        tensors = list(map(local_shard, tensors))
    return placement.is_same(tensors)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, of a DTensor the shard of this rank."""
    return tensor if type(tensor) is torch.Tensor else local_shard(tensor)


def is_held(attributes: Mapping[str, Any]) -> bool:
    """Whether other code has the state of an optimizer, an entry or a tensor of it.

    Args:
        attributes: `vars()` of the optimizer.
    """
    to_state, to_others = _count_own_references()
    if _count_state(attributes) > to_state:
        return True  # all of it: the rest need not be counted
    counts = _count_others(attributes, torch.Tensor)
    return any(found > own for found, own in zip(counts, to_others, strict=True))


def _count_state(attributes: Mapping[str, Any]) -> int:
    """Return how many references there are to a state."""
    return sys.getrefcount(attributes["state"])


def _count_others(attributes: Mapping[str, Any], kind: type) -> tuple[int, int]:
    """Return how many references there are to an entry and to a tensor, at the most.

    Args:
        attributes: Where the state is, as "state".
        kind: The class of tensors.
    """
    entries = [x for x in attributes["state"].values() if isinstance(x, dict)]
    tensors: list[Any] = [
        x for entry in entries for x in entry.values() if isinstance(x, kind)
    ]
    tensors += [local_shard(x) for x in tensors if as_dtensor(x) is not None]
    return (
        max(map(sys.getrefcount, entries), default=0),
        max(map(sys.getrefcount, tensors), default=0),
    )


@cache
def _count_own_references() -> tuple[int, tuple[int, int]]:
    """Return these counts for a state of which no other code has anything."""

    class Kept:
        """In the place of a tensor."""

    attributes = {"state": {index: {"kept": Kept()} for index in range(2)}}
    return _count_state(attributes), _count_others(attributes, Kept)


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
