# SPDX-License-Identifier: Apache-2.0
"""torch's own methods: `unscale_`, `step` and `update`, with its order and errors.

What is meant by each is in torch's documentation. `_maybe_opt_step`, which others
override, is torch's own.
"""

import warnings
from collections import defaultdict
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from lossscale.core import checks
from lossscale.core.policies import Fixed
from lossscale.core.state import Signal
from lossscale.torch import accumulation, closures, eager, handover
from lossscale.torch.compiling import uncompiled
from lossscale.torch.eager import Request
from lossscale.torch.gradients import inverse_of
from lossscale.torch.looking import Looking
from lossscale.torch.rules import Flags, Rule
from lossscale.torch.steps import Part, StepReport
from lossscale.torch.verdict import AMAX, NAN, NORM, Verdict


class DropIn(Looking):
    """torch's methods; `GradScaler` adds its own."""

    @uncompiled
    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of an optimizer, in place; waits for nothing."""
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        optimizer = handover.inner(optimizer)
        state = self._ready(optimizer)
        if id(optimizer) in self._iteration.sums:
            accumulation.finish(self, optimizer)
        elif self._overrides("_unscale_grads_"):
            zero = torch.zeros((), dtype=torch.float32, device=self._scale.device)
            found = self._unscale_grads_(
                optimizer, inverse_of(self._scale), zero, self._allow_fp16
            )
            try:
                # It may have looked at them by itself, and asked nobody.
                found = self._agree_on_flags(self._plan(optimizer), found)
            except BaseException:
                self._give_up(optimizer)
                raise
            state["found_inf_per_device"] = found
        else:
            state["found_inf_per_device"] = self._look(
                optimizer, Request(write=True), allow_fp16=self._allow_fp16
            )
        state["stage"] = OptState.UNSCALED

    @uncompiled
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless a gradient is not finite.

        With `closure=` the optimizer may ask for the loss several times: the closure
        scales it, runs `backward` and returns it. Its gradients are unscaled and
        checked after each call; if they are not finite, the parameters and the
        optimizer's state are what they were before the step.

        Args:
            optimizer: The optimizer to step.
            *args: What `optimizer.step` takes.
            **kwargs: The same, by name.

        Returns:
            What `optimizer.step` returned; `None` if the step was skipped.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        return self._step(optimizer, args, kwargs, looked=False)

    def _step(
        self,
        optimizer: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        looked: bool,
    ) -> Any:
        """Step an optimizer; `looked` says that its gradients were just looked at."""
        closure = kwargs.pop("closure", None)
        if closure is None and args and callable(args[0]):
            closure, args = args[0], args[1:]
        if closure is None:
            self._check_scale_growth_tracker("step")
        state = self._unstepped(optimizer)
        if closure is None and self._iteration.of(state).given_up:
            message = f"No inf checks were recorded for this optimizer. {_GIVEN_UP}"
            raise AssertionError(message)
        if closure is not None:
            result = closures.step(self, optimizer, closure, *args, **kwargs)
        elif handover.takes_scale(optimizer):
            if not looked:
                self._settle(optimizer)
            result = self._step_handed_over(optimizer, state, args, kwargs)
        else:
            result = self._step_on_host(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _unstepped(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer that has not taken this step yet."""
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            message = "step() has already been called since the last update()."
            raise RuntimeError(message)
        return state

    def _settle(self, optimizer: Any) -> None:
        """Have gradients looked at that are as they came; unscaled ones have been."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            return
        by_itself = handover.takes_scale(optimizer)
        if id(optimizer) in self._iteration.sums or not by_itself:
            self.unscale_(optimizer)
        elif not handover.takes_scaler(optimizer):
            self._check_inf_per_device(optimizer)

    def _step_handed_over(
        self,
        optimizer: Any,
        state: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step an optimizer that unscales and skips by itself; nothing waits."""
        if handover.takes_scaler(optimizer):
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to "
                "the passed optimizer. In the near future GradScaler registers "
                "`grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer "
                "and let the optimizer use them directly.",
                FutureWarning,
                stacklevel=5,
            )
            return optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        found = self._any(list(state["found_inf_per_device"].values()))
        divisor = self._iteration.of(state).divisor
        if divisor is None and state["stage"] is OptState.READY:
            divisor = self._scale
        if not handover.prepare_momentum(optimizer, found):
            return None
        if handover.is_watched(optimizer) and bool(found):
            return None
        with handover.handed_over(optimizer, divisor, found):
            return optimizer.step(*args, **kwargs)

    def _step_on_host(
        self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step an optimizer if the host, having waited for the flag, says so."""
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            message = "No inf checks were recorded for this optimizer."
            raise AssertionError(message)
        return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    def _unscale_again(self, optimizer: Any) -> bool:
        """Unscale what a closure's backward pass has left; return if it is finite."""
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        elif (facts := self._iteration.of(state)).divisor is not None:
            # The closure has clipped them, and nobody else will.
            facts.divisor = None
            known, gradients = self._gradients(optimizer)
            buffer = cast("Part", facts.part).verdict.buffer
            if known is not None:  # a rank may have no gradient
                known.multiply_(gradients, buffer)
        found = state["found_inf_per_device"]
        if not found:
            message = "No inf checks were recorded for this optimizer."
            raise AssertionError(message)
        return not any(flag.item() for flag in found.values())

    def _rearm(self, optimizer: Any) -> None:
        """Have the next gradients of an optimizer looked at anew."""
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.READY
        facts = self._iteration.of(state)
        facts.divisor, facts.clipped, facts.given_up = None, False, False

    def _judge_sum(self, optimizer: Any, total: Any) -> None:
        """Look at what micro-batches add up to: the sum may be infinite as well."""
        one = torch.ones((), dtype=torch.float32, device=self._scale.device)
        request = Request(with_amax=True)
        found = self._look(optimizer, request, allow_fp16=True, inverse=one)
        none_good = (total.good == 0).to(torch.float32)
        for flag in found.values():
            torch.maximum(flag, none_good.to(flag.device), out=flag)
        state = self._per_optimizer_states[id(optimizer)]
        part = self._iteration.of(state).part
        if part is not None:
            part.verdict.add(total.tops, self._scale, none_good, total.overflowed)
            if total.everywhere:
                part.verdict.tell(*total.everywhere)
        state["found_inf_per_device"] = found

    # -- the end of the iteration ------------------------------------------------------

    @uncompiled
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale; call it once, after all optimizers of an iteration.

        Args:
            new_scale: A scale to go on with instead of what the policy says: a float,
                or a tensor of one number.

        Raises:
            CollapseError: If so many steps in a row were skipped that the alarm went
                off, and it was asked to raise. The update itself is complete.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        if new_scale is not None:
            new_scale = self._checked(new_scale)
        flags = {
            key: list(state["found_inf_per_device"].values())
            for key, state in self._per_optimizer_states.items()
            if state["found_inf_per_device"]
        }
        given_up = any(
            self._iteration.of(state).given_up
            for state in self._per_optimizer_states.values()
        )
        wanted = self._on_no_gradients == "raise" and not flags
        if new_scale is None and (wanted or given_up):
            message = "No inf checks were recorded prior to update."
            raise AssertionError(f"{message} {_GIVEN_UP}" if given_up else message)
        report = None
        if flags or new_scale is None:
            report = self._advance(flags, moves=new_scale is None)
        if isinstance(new_scale, float):
            self._scale.fill_(new_scale)
        elif new_scale is not None:
            self._scale.copy_(new_scale.reshape(()))
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        if report is not None:
            self._history.add(report)

    def _checked(self, new_scale: Any) -> float | torch.Tensor:
        """Return a scale that somebody wants to go on with, or raise."""
        if isinstance(new_scale, float):
            return checks.as_float32(checks.scale("new_scale", new_scale))
        reason = (
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
        if not isinstance(new_scale, torch.Tensor):
            message = f"{reason} Got {checks.shown(new_scale)}; write a float."
            raise AttributeError(message)  # noqa: TRY004  # which is what torch raises
        kind = torch.device(self._device).type
        if (
            new_scale.device.type != kind
            or new_scale.numel() != 1
            or new_scale.requires_grad
        ):
            raise AssertionError(reason)
        if kind == "cpu":
            checks.scale("new_scale", float(new_scale))
        return new_scale

    def _advance(self, flags: dict[int, list[Any]], *, moves: bool) -> StepReport:
        """Move the scale by what was found; return the report of the step."""
        self._begun += 1
        parts = []
        if not flags:  # a step without gradients, which is a clean one
            flags = {0: [self._any([])]}
        for key, own in flags.items():
            flag = own[0] if len(own) == 1 else self._any(own)
            state = self._per_optimizer_states.get(key)
            part = None if state is None else self._iteration.of(state).part
            if part is None:
                # An optimizer or a subclass has recorded the flag by itself.
                buffer = eager.flag_buffer(flag.reshape(()), self._scale)
                part = Part(lambda: None, Verdict(buffer, measured=False))
            elif len(own) > 1 or flag.data_ptr() != part.verdict.found.data_ptr():
                part.verdict.found.copy_(flag.reshape(()))
            parts.append(part)
        every = [flag for own in flags.values() for flag in own]
        skipped = every[0].reshape(()) if len(every) == 1 else self._any(every)
        # The same as it is, unless somebody else made it.
        skipped = skipped.to(self._scale.device, torch.float32)
        found, held = self._overflowed(parts, skipped)
        loss = self._lost()
        rule = self._current_rule() if moves else _UNMOVED
        happened = Flags(found, skipped, loss, held)
        rule.advance(self._cells(), happened, lambda: self._signal(happened, parts))
        for part in parts:
            part.verdict.publish(self._shelf)
        lost = None
        if loss is not None:
            lost = Verdict(eager.flag_buffer(loss, self._scale), measured=False)
            lost.publish(self._shelf)
        return StepReport(self._begun, tuple(parts), self._names, lost)

    def _overflowed(self, parts: list[Part], skipped: Any) -> tuple[Any, Any]:
        """Return whether a gradient overflowed, and whether the scale must stay.

        It stays if a step was skipped only because finite gradients are too large. With
        one optimizer both are read from its verdict, at no cost.
        """
        dropped = self._iteration.dropped
        if len(parts) == 1 and not dropped:
            return skipped, parts[0].verdict.too_large.to(skipped.device)
        found = self._any([*(part.verdict.overflowed() for part in parts), *dropped])
        return found, skipped * (1.0 - found)

    def _lost(self) -> Any:
        """Return 1.0 if a loss that was not finite keeps the scale; `None` if unknown.

        It does unless gradients of another micro-batch overflowed as well.
        """
        iteration = self._iteration
        if not iteration.lost:
            return iteration.loss
        overflowed = self._any(iteration.dropped)
        return self._any(iteration.lost) * (1.0 - overflowed)

    def _signal(self, happened: Flags, parts: list[Part]) -> Signal:
        """Return what a policy is told, in full only where it may look at it."""
        lost = happened.loss
        signal = Signal(
            finite=happened.found == 0,
            loss_finite=None if lost is None else lost == 0,
            too_large=happened.held != 0,
        )
        if self._rule.is_ours or not all(part.verdict.measured for part in parts):
            return signal
        device = self._scale.device
        buffer = parts[0].verdict.buffer
        if len(parts) > 1:
            buffers = [part.verdict.buffer for part in parts]
            buffer = eager.combine(buffers, device, Request(with_norm=True))
        nan, amax, norm = (buffer[at].to(device) for at in (NAN, AMAX, NORM))
        return signal._replace(nan=nan != 0, amax=amax, norm=norm)


_GIVEN_UP = (
    "Unscaling its gradients broke off, and they were dropped. To go on, call "
    "load_state_dict(scaler.state_dict()), on all ranks if there are several."
)

_UNMOVED = Rule(Fixed(), wide=False)
"""Counts a step, and leaves the scale to the caller."""
