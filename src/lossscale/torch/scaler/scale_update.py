# SPDX-License-Identifier: Apache-2.0
"""`ScaleUpdate`: a policy that advances the scaler's state, in one of three ways.

On a GPU one kernel runs `core/rule.py`, or the step of another policy of ours. On a CPU
Python numbers do, which the host has anyway. Everything else, and every policy that is
not ours, runs on torch's tensors. The results are the same to the bit.

torch multiplies its factors in float64 and rounds once. A scaler that was given torch's
arguments does that too (`in_float64`); one that was given a policy keeps to the rule,
which multiplies in float32.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
from lossscale.core.portable import KINDS
from lossscale.core.rule import transition
from lossscale.core.state import ScaleState, Signal, Where
from lossscale.core.validation import FLOAT32_MAX, as_float32
from lossscale.torch.devices import device_context
from lossscale.torch.inspection import kernel_backend
from lossscale.torch.inspection.summary import AMAX, LOSS, NAN, NORM

if TYPE_CHECKING:
    from lossscale.torch.inspection.kernels.launch import Kernel, KernelLauncher

_LARGEST_BEFORE_ROUNDING = math.nextafter(FLOAT32_MAX + 2.0**103, 0.0)
"""The largest float64 number that float32 does not round to infinity."""

_NEVER = 2**31 - 2
"""Effectively never: larger than any step count."""


class StateTensors(NamedTuple):
    """The tensors that a scaler owns on a device that is not a CPU."""

    scale: torch.Tensor
    """float32, of no dimension; torch's `_scale`."""
    good_steps: torch.Tensor
    """int32, of no dimension; torch's `_growth_tracker`."""
    bad_steps: torch.Tensor
    """int32, of no dimension."""
    counters: torch.Tensor
    """int32: steps, skipped steps, consecutive skipped steps."""
    settings: torch.Tensor | None
    """float64: the numbers that the kernel reads; `None` without a kernel."""
    memory: tuple[torch.Tensor, ...] = ()
    """float32, of no dimension: what the policy remembers besides."""


class StepOutcome(NamedTuple):
    """What happened in a step, on a device."""

    flags: torch.Tensor
    """float32: 0.0, or not 0.0 if it did. The first says that a gradient was not
    finite. If the step had one summary, this is it."""
    skipped_at: int
    """Which of them says that the step was skipped. Dropping an overflowed micro-batch
    skips no step."""
    too_large_at: int
    """Which of them says that it was skipped only because finite gradients are too
    large."""
    loss_nonfinite: torch.Tensor | None = None
    """The loss was not finite; `None` if the policy does not ask."""
    raw_loss: torch.Tensor | None = None
    """The loss before it was scaled, if it is on this device and noted for the
    report."""
    summary: torch.Tensor | None = None
    """The summary that notes whether it is not finite."""
    copy: torch.Tensor | None = None
    """Pinned memory of the host, to which the kernel copies that summary."""


class HostOutcome(NamedTuple):
    """The same as Python booleans."""

    found_inf: bool
    skipped: bool
    too_large: bool
    loss_nonfinite: bool | None
    applied: bool
    """Every optimizer took its step."""


def torch_policy(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int
) -> Dynamic:
    """Return the policy that torch's arguments describe.

    In torch an interval below 1 or beyond int32 is never reached; nor is it here. A
    factor of 1, which torch's setters and states may hold, moves nothing.
    """
    grows, backs_off = growth_factor != 1.0, backoff_factor != 1.0
    is_whole = isinstance(growth_interval, int) and not isinstance(
        growth_interval, bool
    )
    if not grows or (is_whole and not 0 < growth_interval < _NEVER):
        growth_interval = _NEVER
    return replace(
        presets.get("torch"),
        init_scale=init_scale,
        growth_factor=growth_factor if grows else 2.0,
        backoff_factor=backoff_factor if backs_off else 0.5,
        growth_interval=growth_interval,
        hysteresis=1 if backs_off else _NEVER,
    )


def torch_factors(policy: Policy) -> tuple[float, float, int]:
    """Return torch's three numbers of a policy, for its getters and state dicts.

    A policy that falls back to a rule is shown as that rule, which torch's class then
    follows. Any other that torch could not follow is shown as a scale that stays: that
    is what torch does with such a state.
    """
    policy = getattr(policy, "rule", policy)
    if isinstance(policy, Dynamic):
        factor = policy.backoff_factor or 1.0 / (policy.backoff_divisor or 2.0)
        return policy.growth_factor, factor, policy.growth_interval
    return 1.0, 1.0, 2000


class ScaleUpdate:
    """A policy, and how to run it on the state of a scaler."""

    def __init__(self, policy: Policy, *, in_float64: bool) -> None:
        self.policy = policy
        # Products with powers of two are exact: there is nothing to round.
        self._in_float64 = in_float64 and not _is_exact(policy)
        self.runs_on_host = isinstance(policy, Fixed) or in_float64 or _is_exact(policy)
        """Whether Python numbers give the same results as float32 tensors."""
        self.first = policy.init()
        """The first state, as Python numbers."""
        self.is_builtin = type(policy) in (Fixed, Dynamic)
        """Whether the policy reads nothing but the flags."""
        self.checks_loss = bool(getattr(policy, "hold_on_nonfinite_loss", False))
        self._settings, self._switches = _NO_SETTINGS, _OFF
        self.growth_threshold = 0
        """While fewer finite steps were counted, and no overflow, a finite step does no
        more than count."""
        if isinstance(policy, Dynamic):
            self.growth_threshold = policy.settings.growth_threshold
            self._settings = self._find_settings(policy)
            self._switches = policy.switches
        numbers = self._settings
        self._whole_numbers = (
            numbers.growth_threshold,
            numbers.good_after_growth,
            numbers.hysteresis,
        )
        """The settings that the kernel is given as arguments."""
        self._moves = isinstance(policy, Dynamic), *self._switches
        self._update_kernel: Kernel | None = None
        self._launchers: dict[torch.device, KernelLauncher] = {}
        self._kernels: dict[tuple[bool, bool], Kernel] = {}
        """Of a policy that is not built in, by what it can read."""

    # -- on the host -------------------------------------------------------------------

    def advance_numbers(self, state: ScaleState, outcome: HostOutcome) -> ScaleState:
        """Return the next state, of Python numbers."""
        if outcome.too_large:
            return state  # as `advance` says, without a choice between two states
        if type(self.policy) is Dynamic and not self.checks_loss:
            scale, good, bad = transition(
                state.scale,
                state.good_steps,
                state.bad_steps,
                not outcome.found_inf,
                *self._settings,
                *self._switches,
                _pick,
            )
            return ScaleState(as_float32(scale), good, bad)
        signal = Signal(
            finite=not outcome.found_inf, loss_finite=_negate(outcome.loss_nonfinite)
        )
        moved = self._advance(state, signal, _pick)
        return moved._replace(scale=as_float32(moved.scale))

    # -- on tensors --------------------------------------------------------------------

    def can_copy(self, tensors: StateTensors) -> bool:
        """Whether the kernel that advances the state copies a summary to the host."""
        return self.is_builtin and tensors.settings is not None

    def advance_tensors(
        self,
        tensors: StateTensors,
        outcome: StepOutcome,
        measurements: Callable[[], torch.Tensor | None],
    ) -> None:
        """Advance the state on its device, in place.

        Args:
            tensors: The state.
            outcome: What happened.
            measurements: Returns a summary, for a policy that reads more than flags.
        """
        if self.can_copy(tensors):
            self._launch(tensors, outcome)
            return
        measured = measurements()
        if tensors.settings is not None and type(self.policy) in KINDS.values():
            self._launch_policy(tensors, outcome, measured)
            return
        scale = tensors.scale
        if self._in_float64 and scale.device.type != "mps":
            scale = scale.double()
        fields = tensors.good_steps, tensors.bad_steps, *tensors.memory
        fields = fields[: len(self.first) - 1]  # a scale that is set leaves the memory
        state = type(self.first)(scale, *fields)
        signal = _make_signal(outcome, measured)
        moved = self._advance(state, signal, torch.where)
        # The scale last: an interrupt in between must not move it twice.
        targets = *fields[::-1], tensors.scale
        for tensor, value in zip(targets, moved[::-1], strict=True):
            tensor.copy_(torch.as_tensor(value, device=tensor.device))
        skipped = outcome.flags[outcome.skipped_at] != 0.0
        steps, total, consecutive = tensors.counters.unbind()
        counted = [
            steps + 1,
            total + skipped.to(torch.int32),
            torch.where(skipped, consecutive + 1, 0),
        ]
        tensors.counters.copy_(torch.stack(counted))
        if outcome.raw_loss is not None and outcome.summary is not None:
            outcome.summary[LOSS].copy_(~torch.isfinite(outcome.raw_loss))

    def make_settings(self, device: torch.device) -> torch.Tensor | None:
        """Return a tensor of the numbers that the kernel reads, if one runs there."""
        if not kernel_backend.is_available(device):
            return None
        return torch.zeros(len(_KERNEL_SETTINGS), dtype=torch.float64, device=device)

    def write_settings(self, settings: torch.Tensor | None) -> None:
        """Write the numbers that the kernel reads, where a graph finds them too."""
        if settings is None or not isinstance(self.policy, Dynamic):
            return
        numbers = self._settings
        # By value: a graph cannot capture a copy from the host.
        for slot, name in zip(settings, _KERNEL_SETTINGS, strict=True):
            slot.fill_(getattr(numbers, name))

    def _launch(self, tensors: StateTensors, outcome: StepOutcome) -> None:
        """Advance the state by one kernel."""
        kernel, device = self._update_kernel, tensors.scale.device
        if kernel is None:
            from lossscale.torch.inspection.kernels import (  # noqa: PLC0415
                scale_update,
            )

            kernel = self._update_kernel = scale_update.update_scale
        held = outcome.loss_nonfinite if self.checks_loss else None
        loss, copy = outcome.raw_loss, outcome.copy
        summary = outcome.flags if outcome.summary is None else outcome.summary
        with device_context(device):
            self._launcher_on(device).launch(
                kernel,
                1,
                (
                    *tensors[:4],
                    outcome.flags,
                    # Pointers that are not used may be any.
                    outcome.flags if held is None else held,
                    outcome.flags if loss is None else loss,
                    summary,
                    outcome.flags if copy is None else copy,
                    summary.shape[0],
                    tensors.settings,
                    *self._whole_numbers,
                ),
                (
                    outcome.skipped_at,
                    outcome.too_large_at,
                    self._in_float64,
                    held is not None,
                    loss is not None,
                    copy is not None,
                    *self._moves,
                ),
            )

    def _launch_policy(
        self,
        tensors: StateTensors,
        outcome: StepOutcome,
        measured: torch.Tensor | None,
    ) -> None:
        """Advance the state by a kernel that was written from the policy's step."""
        device = tensors.scale.device
        loss, held = outcome.raw_loss, outcome.loss_nonfinite
        key = held is not None, measured is not None
        kernel = self._kernels.get(key)
        if kernel is None:
            from lossscale.torch.inspection.kernels import (  # noqa: PLC0415
                policy_update,
            )

            kernel = self._kernels[key] = policy_update.make_kernel(
                self.policy, has_loss=key[0], has_measurements=key[1]
            )
        if measured is not None:
            measured = measured.to(device)
        with device_context(device):
            self._launcher_on(device).launch(
                kernel,
                1,
                (
                    *tensors[:3],
                    *tensors.memory,
                    tensors.counters,
                    outcome.flags,
                    # Pointers that are not used may be any.
                    outcome.flags if held is None else held,
                    outcome.flags if loss is None else loss,
                    outcome.flags if outcome.summary is None else outcome.summary,
                    outcome.flags if measured is None else measured,
                ),
                (outcome.skipped_at, outcome.too_large_at, loss is not None),
                fuses=False,  # as torch's operations, which round each result
            )

    def _launcher_on(self, device: torch.device) -> "KernelLauncher":
        """Return the launcher of a device."""
        launcher = self._launchers.get(device)
        if launcher is None:
            # An import takes microseconds also if the module is there already.
            from lossscale.torch.inspection.kernels.launch import (  # noqa: PLC0415
                KernelLauncher,
            )

            launcher = self._launchers[device] = KernelLauncher()
        return launcher

    # -- either way --------------------------------------------------------------------

    def _advance(self, state: ScaleState, signal: Signal, where: Where) -> ScaleState:
        policy = self if self._in_float64 else self.policy
        return advance(policy, state, signal, where=where)

    def init(self) -> ScaleState:
        """Return the first state of the policy."""
        return self.policy.init()

    def step(self, state: ScaleState, signal: Signal, *, where: Where) -> ScaleState:
        """Return the state after a step of the policy, rounded once as torch does."""
        policy = cast("Dynamic", self.policy)
        scale, good, bad = state
        moved = transition(
            scale, good, bad, signal.finite, *self._settings, *self._switches, where
        )
        return policy.keep_if_loss_nonfinite(state, ScaleState(*moved), signal, where)

    def _find_settings(self, policy: Dynamic) -> Settings:
        """Return the numbers of the rule, unrounded if torch's way is wanted."""
        if not self._in_float64:
            return policy.settings
        return policy.settings._replace(
            growth_factor=policy.growth_factor,
            backoff=cast("float", policy.backoff_factor),
            # A product may be a little larger before rounding than after it.
            max_scale=_LARGEST_BEFORE_ROUNDING,
        )


_KERNEL_SETTINGS = ("growth_factor", "backoff", "min_scale", "max_scale")

_NO_SETTINGS = Settings(2.0, 1, 0, 0.5, 1, 1.0, 1.0)
_OFF = Switches(*[False] * len(Switches._fields))
"""What the kernel is compiled with for a scale that never moves; it reads neither."""


def _make_signal(outcome: StepOutcome, measured: torch.Tensor | None) -> Signal:
    """Return what a policy reads, as tensors."""
    loss = outcome.loss_nonfinite
    signal = Signal(
        finite=outcome.flags[0] == 0,
        loss_finite=None if loss is None else loss == 0,
        too_large=outcome.flags[outcome.too_large_at] != 0,
    )
    if measured is None:
        return signal
    device = outcome.flags.device
    nan, amax, norm = (measured[index].to(device) for index in (NAN, AMAX, NORM))
    return signal._replace(nan=nan != 0, amax=amax, norm=norm)


def _pick(condition: Any, first: Any, second: Any) -> Any:
    """Return one of two Python numbers: the host's `where`."""
    return first if condition else second


def _negate(flag: bool | None) -> bool | None:
    return None if flag is None else not flag


def _is_exact(policy: Policy) -> bool:
    """Whether every product of the rule is one with a power of two."""
    if not isinstance(policy, Dynamic):
        return False
    factors = policy.settings.growth_factor, policy.settings.backoff
    settings = policy.growth_factor, policy.backoff_divisor or policy.backoff_factor
    mantissas = [math.frexp(factor)[0] for factor in factors]
    return factors == settings and set(mantissas) == {0.5}
