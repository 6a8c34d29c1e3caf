# SPDX-License-Identifier: Apache-2.0
"""What torch provides for the classic classes: tensors that are updated in place.

Everything happens at once, as in TensorFlow's eager mode.
"""

from collections.abc import Mapping
from typing import Any

import torch

from lossscale.core import classic
from lossscale.core.policies import Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState, Signal
from lossscale.core.trees import map_leaves
from lossscale.core.validation import plain_number
from lossscale.errors import StateError
from lossscale.torch import functional, gradient


class StateVariables:
    """A state kept in tensors of no dimension.

    They are on the CPU first, where a number costs a GPU's kernels nothing, and go to
    the device from which the first flag comes.
    """

    def __init__(self, state: ScaleState, variables: list[classic.Variable]) -> None:
        self._tensors = {
            kind.name: torch.full(
                (), value, dtype=getattr(torch, kind.dtype), device="cpu"
            )
            for kind, value in zip(variables, state, strict=False)
        }

    def read(self) -> ScaleState:
        """Return the current values; no `bad` tensor reads as 0."""
        scale, *counters = self._tensors.values()
        # A copy: autograd keeps the scale until the backward pass, which may come
        # after an update.
        values = [scale.clone(), *counters]
        zero = torch.zeros((), dtype=torch.int32, device=scale.device)
        return ScaleState(*(values + [zero] * (len(ScaleState._fields) - len(values))))

    def read_for_repr(self) -> ScaleState:
        """Return the current values for `repr`; on a GPU this waits for it."""
        return ScaleState(*(value.item() for value in self.read()))

    def assign(self, state: ScaleState) -> None:
        """Store new values, in place unless they come from another device."""
        for (name, tensor), value in zip(self._tensors.items(), state, strict=False):
            if isinstance(value, torch.Tensor) and value.device != tensor.device:
                self._tensors[name] = value.to(tensor.dtype, copy=True)
            elif isinstance(value, torch.Tensor):
                tensor.copy_(value)
            else:
                tensor.fill_(value)

    def state_dict(self) -> dict[str, float]:
        """Return the current values under their names, as Python numbers."""
        return {name: tensor.item() for name, tensor in self._tensors.items()}

    def load_state_dict(self, policy: Policy, saved: Mapping[str, Any]) -> None:
        """Store saved values, if they are a state that the policy can go on from."""
        check_keys(saved, self._tensors)
        values = [plain_number(saved[name]) for name in self._tensors]
        missing = [0] * (len(ScaleState._fields) - len(values))
        self.assign(check_state(policy, ScaleState(*values, *missing)))


def check_keys(saved: Any, expected: Mapping[str, Any]) -> None:
    """Raise unless a saved state has exactly the expected keys."""
    if not isinstance(saved, Mapping) or set(saved) != set(expected):
        keys = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved)
        message = (
            f"A saved state with the keys {sorted(expected)} was expected, got "
            f"{keys}. Nothing was loaded."
        )
        raise StateError(message)


class _Binding(classic.EagerBinding):
    """The methods that the framework-free bodies call."""

    def create_variables(
        self,
        owner: Any,
        state: ScaleState,
        scale: classic.Variable,
        good: classic.Variable,
        bad: classic.Variable | None,
    ) -> StateVariables:
        del owner
        return StateVariables(
            state, [kind for kind in (scale, good, bad) if kind is not None]
        )

    def constant(self, value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float32, device="cpu")

    def flag(self, finite: Any) -> torch.Tensor:
        return functional.flag(finite)

    def all_finite(self, grads: Any) -> torch.Tensor:
        checked = map_leaves(
            lambda path, leaf: gradient.coalesce(
                gradient.upcast(gradient.check(path, leaf))
            ),
            grads,
        )
        return functional.all_finite(checked, torch.device("cpu"))

    def update(self, policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
        return functional.update(policy, state, signal)

    def scale_loss(self, loss: Any, loss_scale: Any) -> Any:
        return functional.scale(loss, ScaleState(loss_scale, 0, 0))

    def unscale(self, grads: list[Any], loss_scale: Any) -> list[Any]:
        # Whether they are finite is asked when they are applied.
        return list(functional.divide(grads, loss_scale))


BINDING = _Binding()
