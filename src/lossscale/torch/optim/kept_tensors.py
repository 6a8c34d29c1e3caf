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
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
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
        self._params = list(state)
        keys = iter(
            (param, name)
            for param in params
            for name in names
            if isinstance(state.get(param, {}).get(name), torch.Tensor)
        )
        self._samples: list[Sample] = []
        while chosen := list(islice(keys, _SAMPLE)):
            tensors = [_local(state[param][name]) for param, name in chosen]
            self._samples.append(Sample(chosen, Placement(tensors)))
        self._next = 0

    def are_in(self, state: State) -> bool:
        """Whether a state has tensors like these, all of them at the same addresses."""
        return are_identical(list(state), self._params) and all(
            _has(state, sample) for sample in self._samples
        )

    def are_sampled_in(self, state: State) -> bool:
        """The same for some of them, each time others."""
        if not self._samples:
            return True
        self._next = (self._next + 1) % len(self._samples)
        return _has(state, self._samples[self._next])


def _has(state: State, sample: Sample) -> bool:
    try:
        tensors = [state[param][name] for param, name in sample.keys]
    except KeyError:
        return False
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    return sample.placement.is_same(list(map(_local, tensors)))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, of a DTensor the shard of this rank."""
    return tensor if type(tensor) is torch.Tensor else local_shard(tensor)


def is_held(attributes: Mapping[str, Any]) -> bool:
    """Whether other code has the state of an optimizer, an entry or a tensor of it.

    Args:
        attributes: `vars()` of the optimizer.
    """
    counts = _count_references(attributes, torch.Tensor)
    own = _count_own_references()
    return any(found > least for found, least in zip(counts, own, strict=True))


def _count_references(
    attributes: Mapping[str, Any], kind: type
) -> tuple[int, int, int]:
    """Return the largest counts of references: to a state, an entry and a tensor.

    Args:
        attributes: Where the state is, as "state".
        kind: The class of tensors.
    """
    state = attributes["state"]
    entries = [entry for entry in state.values() if isinstance(entry, dict)]
    values = [value for entry in entries for value in entry.values()]
    tensors: list[Any] = [value for value in values if isinstance(value, kind)]
    del values
    tensors += [local_shard(x) for x in tensors if as_dtensor(x) is not None]
    return (
        sys.getrefcount(state),
        max(map(sys.getrefcount, entries), default=0),
        max(map(sys.getrefcount, tensors), default=0),
    )


@cache
def _count_own_references() -> tuple[int, int, int]:
    """Return these counts for a state of which no other code has anything."""

    class Kept:
        """In the place of a tensor."""

    entries = {index: {"kept": Kept()} for index in range(2)}
    attributes = {"state": entries}
    del entries
    return _count_references(attributes, Kept)


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
