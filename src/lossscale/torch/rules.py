# SPDX-License-Identifier: Apache-2.0
"""How the state of a scaler moves, in place: a policy, and three ways to run it.

On a GPU one kernel runs `core/rule.py`; on a CPU Python numbers do, which the host has
anyway; everything else, and every policy that is not ours, runs on torch's tensors. The
results are the same to the bit.

torch multiplies its factors in float64 and rounds once. A scaler that was given torch's
arguments does that too (`wide`); one that was given a policy keeps to the rule, which
multiplies in float32.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from lossscale import presets
from lossscale.core.policies import (
    Dynamic,
    Fixed,
    Policy,
    Settings,
    Switches,
    advance,
)
from lossscale.core.rule import transition
from lossscale.core.state import ScaleState, Signal, Where
from lossscale.core.validation import FLOAT32_MAX, as_float32
from lossscale.torch import fast
from lossscale.torch.devices import on

_LARGEST_BEFORE_ROUNDING = math.nextafter(FLOAT32_MAX + 2.0**103, 0.0)
"""The largest float64 number that float32 does not round to infinity."""

_NEVER = 2**31 - 2
"""An interval that no run lives to see."""


class Cells(NamedTuple):
    """The tensors that a scaler owns, all on one device."""

    scale: Any
    """float32, of no dimension; torch's `_scale`."""
    good: Any
    """int32, of no dimension; torch's `_growth_tracker`."""
    bad: Any
    """int32, of no dimension."""
    counters: Any
    """int32: steps, skipped steps, skipped steps in a row."""
    numbers: Any
    """float64: what the kernel reads of the rule; `None` where there is no kernel."""


class Flags(NamedTuple):
    """What happened in a step: 0.0, or not 0.0 if it did; float32, of no dimension."""

    found: Any
    """A gradient was not finite."""
    skipped: Any
    """A step was skipped; not the same where a bad micro-batch was dropped."""
    loss: Any
    """The loss was not finite; `None` if nobody looked."""
    held: Any
    """A step was skipped, and only because finite gradients were too large."""
    raw_loss: Any = None
    """The loss itself, if it is to be noted for the report and is not on the host."""
    loss_seen: Any = None
    """Where to note whether it was not finite."""


def torchs_policy(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int
) -> Dynamic:
    """Return the policy that torch's arguments stand for.

    An interval below 1 or beyond int32 never comes round in torch; nor does it here. A
    factor of 1, which torch's setters and states may hold, moves nothing.
    """
    still = growth_factor == 1.0, backoff_factor == 1.0
    whole = isinstance(growth_interval, int) and not isinstance(growth_interval, bool)
    if still[0] or (whole and not 0 < growth_interval < _NEVER):
        growth_interval = _NEVER
    base = presets.get("torch")
    return replace(
        base,
        init_scale=init_scale,
        growth_factor=2.0 if still[0] else growth_factor,
        backoff_factor=0.5 if still[1] else backoff_factor,
        growth_interval=growth_interval,
        hysteresis=_NEVER if still[1] else 1,
    )


def shown_factors(policy: Policy) -> tuple[float, float, int]:
    """Return torch's three numbers of a policy, for its getters and state dicts.

    A policy that torch could not follow is shown as a scale that stays: that is what
    torch does with such a state.
    """
    if isinstance(policy, Dynamic):
        factor = policy.backoff_factor or 1.0 / (policy.backoff_divisor or 2.0)
        return policy.growth_factor, factor, policy.growth_interval
    return 1.0, 1.0, 2000


class Rule:
    """A policy at work on the cells of a scaler."""

    def __init__(self, policy: Policy, *, wide: bool) -> None:
        self.policy = policy
        # Products of powers of two are exact: there is nothing to round.
        self._wide = wide and not _is_exact(policy)
        self._on_host = isinstance(policy, Fixed) or wide or _is_exact(policy)
        self.is_ours = type(policy) in (Fixed, Dynamic)
        self.checks_loss = bool(getattr(policy, "hold_on_nonfinite_loss", False))
        self._repeated: Any = None

    @staticmethod
    def room(device: Any) -> Any:
        """Return a tensor for what a kernel will read of a rule on a device."""
        if not fast.available(device):
            return None
        return torch.zeros(len(_NUMBERS), dtype=torch.float64, device=device)

    def fill(self, numbers: Any) -> None:
        """Write what the kernel reads into its tensor, where a graph finds it too."""
        if numbers is None or not isinstance(self.policy, Dynamic):
            return
        settings = self._settings()
        # By value: a copy from the host is nothing that a graph could capture.
        for number, name in zip(numbers, _NUMBERS, strict=True):
            number.fill_(getattr(settings, name))

    def advance(self, cells: Cells, flags: Flags, signal: Callable[[], Signal]) -> None:
        """Take one step.

        Args:
            cells: The state, changed in place.
            flags: What happened, tensors of no dimension on the same device.
            signal: Returns the same and more, as a policy is told it.
        """
        device = cells.scale.device
        if self.is_ours and cells.numbers is not None:
            self._by_kernel(cells, flags)
            return
        if self._on_host and device.type == "cpu":
            self._by_host(cells, flags)
        else:
            self._by_tensors(cells, flags, signal())
        if flags.raw_loss is not None:
            flags.loss_seen.copy_(~torch.isfinite(flags.raw_loss))

    def _settings(self) -> Settings:
        """Return the numbers of the rule, as torch takes them if that is wanted."""
        policy = cast("Dynamic", self.policy)
        if not self._wide:
            return policy.settings
        return policy.settings._replace(
            growth_factor=policy.growth_factor,
            backoff=cast("float", policy.backoff_factor),
            # What comes before rounding may be a little above what comes after it.
            max_scale=_LARGEST_BEFORE_ROUNDING,
        )

    def _moved(self, state: ScaleState, signal: Signal, where: Any) -> ScaleState:
        """Return the next state, of the kind of numbers that the state has."""
        policy = self if self._wide else self.policy
        return advance(policy, state, signal, where=where)

    def init(self) -> ScaleState:
        """Return the first state of the policy."""
        return self.policy.init()

    def step(self, state: ScaleState, signal: Signal, *, where: Where) -> ScaleState:
        """Return the state after a step of the policy, as torch rounds it."""
        policy = cast("Dynamic", self.policy)
        scale, good, bad = state
        settings = self._settings()
        moved = transition(
            scale, good, bad, signal.finite, *settings, *policy.switches, where
        )
        return policy.keep_if_loss_nonfinite(state, ScaleState(*moved), signal, where)

    def _by_kernel(self, cells: Cells, flags: Flags) -> None:
        from lossscale.torch.kernels import decisions  # noqa: PLC0415
        from lossscale.torch.kernels.launch import Repeated  # noqa: PLC0415

        device = cells.scale.device
        moves = isinstance(self.policy, Dynamic)
        settings = self._settings() if moves else _NO_SETTINGS
        switches = _NO_SWITCHES
        if isinstance(self.policy, Dynamic):
            switches = self.policy.switches
        check_loss = self.checks_loss and flags.loss is not None
        note_loss = flags.raw_loss is not None
        if self._repeated is None:
            self._repeated = Repeated()
        with on(device):
            self._repeated.launch(
                decisions.update,
                1,
                (
                    *cells[:-1],
                    flags.found,
                    flags.skipped,
                    flags.held,
                    flags.loss if check_loss else flags.found,
                    flags.raw_loss if note_loss else flags.found,
                    flags.loss_seen if note_loss else flags.found,
                    cells.numbers,
                    settings.growth_threshold,
                    settings.good_after_growth,
                    settings.hysteresis,
                ),
                (self._wide, check_loss, note_loss, moves, *switches),
            )

    def _by_host(self, cells: Cells, flags: Flags) -> None:
        state = ScaleState(
            cells.scale.item(), cells.good_steps.item(), cells.bad_steps.item()
        )
        loss = None if flags.loss is None else flags.loss.item() == 0.0
        signal = Signal(
            finite=flags.found.item() == 0.0,
            loss_finite=loss,
            too_large=flags.held.item() != 0.0,
        )
        moved = self._moved(state, signal, _pick)
        # The scale last: an interrupt in between must not have it moved twice.
        cells.good_steps.fill_(moved.good_steps)
        cells.bad_steps.fill_(moved.bad_steps)
        cells.scale.fill_(as_float32(moved.scale))
        skipped = flags.skipped.item() != 0.0
        steps, before, row = cells.counters.tolist()
        counted = [steps + 1, before + skipped, row + 1 if skipped else 0]
        cells.counters.copy_(torch.tensor(counted, dtype=torch.int32, device="cpu"))

    def _by_tensors(self, cells: Cells, flags: Flags, signal: Signal) -> None:
        scale = cells.scale
        if self._wide and scale.device.type != "mps":
            scale = scale.double()
        state = ScaleState(scale, cells.good_steps, cells.bad_steps)
        moved = self._moved(state, signal, torch.where)
        # The scale last: an interrupt in between must not have it moved twice.
        for cell, value in zip(cells[2::-1], moved[::-1], strict=True):
            cell.copy_(torch.as_tensor(value, device=cell.device))
        skipped = flags.skipped != 0.0
        steps, before, row = cells.counters.unbind()
        one = skipped.to(torch.int32)
        counted = [steps + 1, before + one, torch.where(skipped, row + 1, 0)]
        cells.counters.copy_(torch.stack(counted))


_NUMBERS = ("growth_factor", "backoff", "min_scale", "max_scale")

_NO_SETTINGS = Settings(2.0, 1, 0, 0.5, 1, 1.0, 1.0)
_NO_SWITCHES = Switches(*[False] * len(Switches._fields))
"""What the kernel is compiled with for a scale that never moves; it reads neither."""


def _pick(condition: Any, first: Any, second: Any) -> Any:
    """Return one of two Python numbers: the host's `where`."""
    return first if condition else second


def _is_exact(policy: Policy) -> bool:
    """Whether every product of the rule is one with a power of two."""
    if not isinstance(policy, Dynamic):
        return False
    factors = policy.settings.growth_factor, policy.settings.backoff
    given = policy.growth_factor, policy.backoff_divisor or policy.backoff_factor
    return factors == given and all(math.frexp(factor)[0] == 0.5 for factor in factors)  # noqa: PLR2004
