# SPDX-License-Identifier: Apache-2.0
"""`ScalerState`: the part of a scaler's state that torch's class does not have.

torch's class owns `_scale` and `_growth_tracker`. Added here: the overflows counted
towards a back-off, three step counters, and what a policy remembers: Python numbers
where the scale is on a CPU, tensors next to it elsewhere. Tensors are changed in place
and keep their identity, so that a captured CUDA graph reads and writes them whatever is
set or loaded later. (Intervals are part of the graph itself, as they are with torch's
class.)
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from lossscale.core.policies import Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState
from lossscale.core.validation import format_value
from lossscale.errors import LossScaleError, StateError
from lossscale.torch.inspection import kernel_backend
from lossscale.torch.scaler.scale_update import (
    HostOutcome,
    ScaleUpdate,
    StateTensors,
    torch_policy,
)

StateDict: TypeAlias = dict[str, Any]
"""torch's type of a state dict."""

SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
COUNTERS = ("total_steps", "skipped_steps", "consecutive_skips")


class ScalerState:
    """Overflows counted, what a policy remembers, step counters, kernel settings."""

    def __init__(self, first: ScaleState) -> None:
        self._bad_steps: int = first.bad_steps
        self._counters = [0, 0, 0]
        self._first = first
        """The policy's own type of state, and what it remembers at first."""
        self._memory: tuple[torch.Tensor, ...] = ()
        """The same as tensors, made together with the others."""
        self._tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None
        self._tensors = None
        """Overflow count, counters and kernel settings, if they are on a device."""
        self.has_started = False
        """Whether the host knows that the policy has found its first scale."""

    def numbers(self) -> tuple[int, list[int]]:
        """Return the overflow count and the counters; waits for the device."""
        if self._tensors is not None:
            bad_steps, counters, _ = self._tensors
            self._bad_steps = int(bad_steps.item())
            self._counters = counters.tolist()
        return self._bad_steps, list(self._counters)

    def memory(self) -> dict[str, float]:
        """Return what the policy remembers, by name; waits for the device."""
        values = [tensor.item() for tensor in self._memory] or self._first[3:]
        return dict(zip(self._first._fields[3:], values, strict=True))

    def set_numbers(self, state: ScaleState, counters: list[int]) -> None:
        """Set all but the scale and the growth tracker, in place."""
        self._first = state
        self.has_started = False
        self._bad_steps, self._counters = state.bad_steps, list(counters)
        if self._tensors is not None:
            self._fill(*self._tensors[:2])

    def initial(self, scale: float, growth_tracker: int) -> ScaleState:
        """Return the state before any tensor was made, as Python numbers."""
        return self._first._replace(
            scale=scale, good_steps=growth_tracker, bad_steps=self._bad_steps
        )

    def current(self, scale: torch.Tensor, growth_tracker: torch.Tensor) -> ScaleState:
        """Return the scale, its counters and what the policy remembers, as tensors."""
        if self._tensors is not None:
            kept = self._tensors[0], *self._memory
            return type(self._first)(scale, growth_tracker, *kept)
        bad_steps = torch.full(
            (), self._bad_steps, dtype=torch.int32, device=scale.device
        )
        values: tuple[float, ...] = self._first[3:]
        memory = [torch.full((), value, device=scale.device) for value in values]
        return type(self._first)(scale, growth_tracker, bad_steps, *memory)

    def write_settings(self, update: ScaleUpdate) -> None:
        """Write the settings of another policy where the kernel reads them."""
        if self._tensors is not None:
            update.write_settings(self._tensors[2])

    def is_on_host(self, scale: torch.Tensor, update: ScaleUpdate) -> bool:
        """Whether the state is Python numbers: asked once for each scaler."""
        return (
            scale.device.type == "cpu"
            and update.runs_on_host
            and not kernel_backend.is_interpreted()
        )

    # -- one step ----------------------------------------------------------------------

    def advance_on_host(
        self,
        scale: torch.Tensor,
        growth_tracker: torch.Tensor,
        update: ScaleUpdate,
        outcome: HostOutcome,
    ) -> None:
        """Advance a state whose tensors are on a CPU."""
        good_steps = int(growth_tracker.item())
        is_finite = not (outcome.found_inf or outcome.skipped or outcome.loss_nonfinite)
        if (
            is_finite
            and not self._bad_steps
            and good_steps + 1 < update.growth_threshold
        ):
            growth_tracker.fill_(good_steps + 1)  # a sum takes three times as long
        else:
            before = ScaleState(scale.item(), good_steps, self._bad_steps)
            after = update.advance_numbers(before, outcome)
            # The scale last: an interrupt in between must not move it twice.
            if after.good_steps != good_steps:
                growth_tracker.fill_(after.good_steps)
            self._bad_steps = after.bad_steps
            if after.scale != before.scale:
                scale.fill_(after.scale)
        counters = self._counters
        counters[0] += 1
        if outcome.skipped:
            counters[1] += 1
            counters[2] += 1
        else:
            counters[2] = 0

    def tensors(
        self, scale: torch.Tensor, growth_tracker: torch.Tensor, update: ScaleUpdate
    ) -> StateTensors:
        """Return the tensors of the state; ours are made where torch's are."""
        device = scale.device
        if self._tensors is None or self._tensors[0].device != device:
            bad_steps = torch.zeros((), dtype=torch.int32, device=device)
            counters = torch.zeros(3, dtype=torch.int32, device=device)
            self._tensors = bad_steps, counters, update.make_settings(device)
            self._memory = tuple(
                torch.zeros((), device=device, dtype=torch.float32)
                for _ in self._first[3:]
            )
            self._fill(bad_steps, counters)
            update.write_settings(self._tensors[2])
        return StateTensors(scale, growth_tracker, *self._tensors, self._memory)

    def _fill(self, bad_steps: torch.Tensor, counters: torch.Tensor) -> None:
        """Write the host's numbers into their tensors."""
        bad_steps.fill_(self._bad_steps)
        # Not torch.tensor(..., device): that copies, which a graph cannot capture.
        for slot, count in zip(counters, self._counters, strict=True):
            slot.fill_(count)
        values: tuple[float, ...] = self._first[3:]
        for tensor, value in zip(self._memory, values, strict=True):
            tensor.fill_(value)

    # -- saving ------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the entries that torch's class does not have."""
        bad_steps, counters = self.numbers()
        memory = self.memory()
        return {
            "bad_steps": bad_steps,
            **dict(zip(COUNTERS, counters, strict=True)),
            **({"memory": memory} if memory else {}),
        }

    def __getstate__(self) -> StateDict:
        """Return Python numbers."""
        bad_steps, counters = self.numbers()
        return {
            "_bad_steps": bad_steps,
            "_counters": counters,
            "_tensors": None,
            "_first": self._first._replace(**self.memory()),
            "_memory": (),
            "has_started": self.has_started,
        }


def parse_state_dict(
    state_dict: StateDict, policy: Policy | None, factors: tuple[float, float, int]
) -> tuple[StateDict, ScaleState, list[int]]:
    """Return torch's entries of a state dict, the state and counters; validated.

    Args:
        state_dict: From this class or from torch's.
        policy: The scaler's own policy; `None` if torch's numbers are its settings.
        factors: The scaler's own factors, which a policy keeps.

    Raises:
        StateError: If a number is invalid, such as a scale of 0.
    """
    _check_entries(state_dict)
    settings: tuple[Any, ...] = tuple(state_dict[name] for name in SETTINGS)
    if policy is None:
        try:
            policy = torch_policy(2.0**16, *settings)
        except LossScaleError as error:
            raise StateError(str(error)) from error
    else:
        settings = factors
    state = ScaleState(
        state_dict["scale"],
        state_dict["_growth_tracker"],
        state_dict.get("bad_steps", 0),
    )
    first = policy.init()
    memory = state_dict.get("memory", {})
    if not isinstance(memory, dict):
        message = f"'memory' must be a dict, got {format_value(memory)}."
        raise StateError(message)
    if set(memory) == set(first._fields[3:]):
        state = first._replace(**state._asdict(), **memory)
    checked = check_state(policy, state)
    counters = [_parse_count(state_dict, name) for name in COUNTERS]
    entries = {
        **dict(zip(SETTINGS, settings, strict=True)),
        "scale": checked.scale,
        "_growth_tracker": checked.good_steps,
    }
    return entries, checked, counters


def _check_entries(state_dict: object) -> None:
    """Raise unless this has the entries of a scaler's state dict."""
    expected = "expected what scaler.state_dict() returned"
    if not isinstance(state_dict, Mapping):
        message = f"The state dict is {format_value(state_dict)}, {expected}."
        raise StateError(message)
    names = ("scale", *SETTINGS, "_growth_tracker")
    missing = [repr(name) for name in names if name not in state_dict]
    if missing:
        message = f"The state dict has no {', '.join(missing)}; {expected}."
        raise KeyError(message)  # which is what torch raises


def _parse_count(state_dict: StateDict, name: str) -> int:
    """Return one of our counters from a state dict; torch's has none."""
    value = state_dict.get(name, 0)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 0 <= value < 2**31 - 1:
        message = (
            f"'{name}' must be a whole number of steps, 0 or more, got "
            f"{format_value(value)}."
        )
        raise StateError(message)
    return int(value)
