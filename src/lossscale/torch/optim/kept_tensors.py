# SPDX-License-Identifier: Apache-2.0
"""`KeptTensors`: the state whose addresses the kernels have, recognized at every step.

Code that moves the state to the host between steps, or resets it, puts other tensors
into `optimizer.state`; from then on the kernels must update those.
"""

import operator
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from lossscale.errors import StateError
from lossscale.torch.distributed.dtensor import as_dtensor, local_shard
from lossscale.torch.optim.identity import are_identical
from lossscale.torch.torch_internals import all_addresses_equal

State: TypeAlias = Mapping[torch.Tensor, Mapping[str, Any]]
"""The state of an optimizer: what is kept for each parameter, by name."""


class KeptTensors:
    """The tensors that are kept for parameters, at one moment."""

    def __init__(
        self, state: State, params: Iterable[torch.Tensor], names: tuple[str, ...]
    ) -> None:
        """Remember the tensors.

        Args:
            state: The state of the optimizer.
            params: The parameters that the kernels update.
            names: What the kernels may read or write of their state.
        """
        self._state = state
        self._params = list(state)
        self._entries = list(state.values())
        self._copies = list(map(dict, self._entries))
        """What each entry holds."""
        known = [state.get(param, {}) for param in params]
        # Name by name: a loop in C over two thousand parameters takes 40 microseconds.
        self._columns: list[tuple[itemgetter[str], list[Any], list[Any]]] = []
        self._tensors: list[torch.Tensor] = []
        for name in names:
            entries = [entry for entry in known if name in entry]
            tensors = [entry[name] for entry in entries]
            if entries:
                self._columns.append((itemgetter(name), entries, tensors))
            self._tensors += [x for x in tensors if isinstance(x, torch.Tensor)]
        self._has_shards = any(
            as_dtensor(tensor) is not None for tensor in self._tensors
        )
        self._addresses = self._find_addresses()
        self._indices = list(range(len(self._tensors)))

    def are_in(self, state: State) -> bool:
        """Whether an optimizer keeps these tensors still, where they were."""
        if state is not self._state or not are_identical(list(state), self._params):
            return False
        # A third of the time of the loops below, which know what matters.
        if are_identical(list(state.values()), self._copies):
            return self._have_addresses()
        if not all(map(operator.is_, state.values(), self._entries)):
            return False
        try:
            for getter, entries, tensors in self._columns:
                if not all(map(operator.is_, map(getter, entries), tensors)):
                    return False
        except KeyError:
            return False
        self._copies = list(map(dict, self._entries))
        return self._have_addresses()

    def _have_addresses(self) -> bool:
        """Whether the tensors have the memory that they had: `.data` may be another."""
        if all_addresses_equal is not None and not self._has_shards:
            return all_addresses_equal(self._tensors, self._addresses, self._indices)
        return self._find_addresses() == self._addresses

    def _find_addresses(self) -> list[int]:
        tensors = map(local_shard, self._tensors) if self._has_shards else self._tensors
        return list(map(torch.Tensor.data_ptr, tensors))


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
