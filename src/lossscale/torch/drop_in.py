# SPDX-License-Identifier: Apache-2.0
"""torch's own methods: `unscale_`, `step` and `update`, with its order and errors.

What is meant by each is in torch's documentation. `_maybe_opt_step`, which others
override, is torch's own.
"""

from collections import defaultdict
from typing import Any, NamedTuple, cast

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from lossscale.core import validation
from lossscale.core.policies import Fixed
from lossscale.core.state import Signal
from lossscale.torch import accumulation, closures, eager, handover
from lossscale.torch.arguments import check_optimizer
from lossscale.torch.compiling import uncompiled
from lossscale.torch.eager import Request
from lossscale.torch.gradients import FirstGradient, inverse_of
from lossscale.torch.keeping import Facts
from lossscale.torch.looking import Looking
from lossscale.torch.rules import Flags, Rule
from lossscale.torch.steps import Part, StepReport
from lossscale.torch.verdict import AMAX, LOSS, NAN, NORM, Verdict


class DropIn(Looking):
    """torch's methods; `GradScaler` adds its own."""

    @uncompiled
    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of an optimizer, in place; waits for nothing.

        After `clip_grad_norm_` it writes the unscaled, clipped gradients back, if they
        are not there yet: a fused optimizer's are left as they came until then.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        optimizer = handover.inner(check_optimizer("unscale_", optimizer))
        state = self._begin(optimizer)
        if state["stage"] is OptState.UNSCALED and self._iteration.of(state).clipped:
            self._write_back(optimizer, state)
            return
        self._unscale(optimizer, self._ready(optimizer))

    def _unscale(
        self, optimizer: Any, state: dict[str, Any], *, stepping: bool = False
    ) -> None:
        """Unscale gradients that are as they came; `stepping` says that `step` does."""
        facts = self._iteration.of(state)
        has_sum = id(optimizer) in self._iteration.sums
        if has_sum:
            accumulation.check_complete(optimizer)
        facts.unscaling = True
        if has_sum:
            accumulation.finish(self, optimizer)
        elif self._overrides("_unscale_grads_"):
            zero = torch.zeros((), dtype=torch.float32, device=self._scale.device)
            found = self._unscale_grads_(
                optimizer, inverse_of(self._scale), zero, self._allow_fp16
            )
            try:
                # It may have looked at them by itself, and asked no other rank.
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
        facts.unscaled = FirstGradient(optimizer)
        facts.losses = self._iteration.losses
        if stepping:
            facts.stepping = facts.unscaled
        facts.unscaling = False

    def _write_back(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Write unscaled, clipped gradients where a fused optimizer's came scaled."""
        facts = self._iteration.of(state)
        if facts.divisor is None:
            return
        facts.unscaling = True
        known, gradients = self._gradients(optimizer)
        buffer = cast("Part", facts.part).verdict.buffer
        if known is not None:  # a rank may have no gradient
            known.multiply_(gradients, buffer)
        facts.divisor = None
        facts.unscaling = False

    @uncompiled
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless a gradient is not finite.

        With `closure=` the optimizer may ask for the loss several times: the closure
        scales it, runs `backward` and returns it. Its gradients are unscaled and
        checked after each call; if they are not finite, the parameters and the
        optimizer's state are what they were before the step.

        If `optimizer.step` raises, the next step with new gradients is taken as usual;
        one with the same gradients is refused, because they may have been applied.

        Args:
            optimizer: The optimizer to step.
            *args: What `optimizer.step` takes.
            **kwargs: The same, by name.

        Returns:
            What `optimizer.step` returned; `None` if the step was skipped.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        check_optimizer("step", optimizer)
        return self._step(optimizer, args, kwargs, looked=False)

    def _step(
        self,
        stepped: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        looked: bool,
    ) -> Any:
        """Step an optimizer.

        Args:
            stepped: The optimizer, or the wrapper of a package around it.
            args: What its `step` takes.
            kwargs: The same, by name.
            looked: Whether its gradients were just looked at.
        """
        closure, args, kwargs = closures.take_closure(stepped, args, kwargs)
        optimizer = handover.inner(stepped)
        if optimizer is not stepped:
            stepped = handover.stepped_by(optimizer, stepped)
        if closure is None:
            self._check_scale_growth_tracker("step")
        state = self._unstepped(optimizer)
        facts = self._iteration.of(state)
        if closure is not None:
            result = closures.step(self, optimizer, stepped, closure, args, kwargs)
        elif handover.takes_scale(optimizer) and handover.takes_scaler(optimizer):
            self._refuse_given_up(facts)
            if not looked and id(optimizer) in self._iteration.sums:
                self.unscale_(optimizer)
            result = handover.step_with_scaler(stepped, self, args, kwargs)
        else:
            self._refuse_given_up(facts)
            if not looked:
                self._prepare(optimizer, state)
            facts.stepping = FirstGradient(optimizer)
            try:
                if handover.takes_scale(optimizer):
                    result = self._step_handed_over(stepped, state, args, kwargs)
                else:
                    result = self._maybe_opt_step(stepped, state, *args, **kwargs)
            except Exception:
                facts.raised = True
                raise
        state["stage"] = OptState.STEPPED
        facts.stepping = None
        return result

    def _unstepped(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer that has not taken this step yet."""
        state = self._begin(optimizer)
        if state["stage"] is OptState.STEPPED:
            message = "step() has already been called since the last update()."
            raise RuntimeError(message)
        if state["stage"] is OptState.UNSCALED:
            self._check_unscaled_again(optimizer, state)
        return state

    def _check_unscaled_again(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Check unscaled gradients again if a backward pass may have come after.

        An iteration that was given up between `unscale_` and `step` leaves its flags:
        those of the next one would be applied unchecked, and still scaled. They are
        taken for new if a loss was scaled since and `.grad` is another tensor; written
        to in place, they are checked as they are.
        """
        facts = self._iteration.of(state)
        unscaled = facts.unscaled
        if unscaled is None or facts.losses == self._iteration.losses:
            return
        if unscaled.is_succeeded(optimizer):
            self._rearm(optimizer)
        elif unscaled.is_rewritten(optimizer):
            one = torch.ones((), dtype=torch.float32, device=self._scale.device)
            found = self._look(optimizer, Request(), allow_fp16=True, inverse=one)
            for device, flag in state["found_inf_per_device"].items():
                if device in found:
                    torch.maximum(flag, found[device].reshape(flag.shape), out=flag)

    def _refuse_given_up(self, facts: Facts) -> None:
        """Raise if unscaling the gradients has failed."""
        if facts.given_up:
            message = f"No inf checks were recorded for this optimizer. {_GIVEN_UP}"
            raise AssertionError(message)

    def _prepare(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Check gradients that are as they came; unscale them if the optimizer cannot.

        A step that is interrupted from here on is known to have begun.
        """
        if state["stage"] is OptState.READY:
            own = handover.takes_scale(optimizer)
            by_itself = own and id(optimizer) not in self._iteration.sums
            if by_itself:
                self._check_inf_per_device(optimizer)
            elif self._overrides("unscale_"):
                self.unscale_(optimizer)
            else:
                self._unscale(optimizer, state, stepping=True)
        if not handover.takes_scale(optimizer):
            self._require_checked(state)

    def _require_checked(self, state: dict[str, Any]) -> None:
        """Raise unless gradients were found to be finite, or not."""
        if not state["found_inf_per_device"]:
            self._iteration.of(state).stepping = None  # the optimizer was not called
            message = "No inf checks were recorded for this optimizer."
            raise AssertionError(message)

    def _step_handed_over(
        self,
        stepped: Any,
        state: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step an optimizer that unscales and skips by itself; nothing waits."""
        optimizer = handover.inner(stepped)
        found = self._any(list(state["found_inf_per_device"].values()))
        divisor = self._iteration.of(state).divisor
        if divisor is None and state["stage"] is OptState.READY:
            divisor = self._scale
        if not handover.prepare_momentum(optimizer, found):
            return None
        if handover.is_watched(optimizer) and bool(found):
            return None
        with handover.handed_over(optimizer, divisor, found):
            return stepped.step(*args, **kwargs)

    def _unscale_again(self, optimizer: Any) -> bool:
        """Unscale what a closure's backward pass has left; return if it is finite."""
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            if self._overrides("unscale_"):
                self.unscale_(optimizer)
            else:
                self._unscale(optimizer, state)
        else:
            # The closure has clipped them, and nobody else will.
            self._write_back(optimizer, state)
        self._require_checked(state)
        return not any(flag.item() for flag in state["found_inf_per_device"].values())

    def _judge_sum(self, optimizer: Any, total: Any) -> None:
        """Look at what micro-batches add up to: the sum may be infinite as well."""
        one = torch.ones((), dtype=torch.float32, device=self._scale.device)
        request = Request(with_amax=True)
        found = self._look(optimizer, request, allow_fp16=True, inverse=one)
        none_good = (total.good_steps == 0).to(torch.float32)
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
        states = self._per_optimizer_states
        flags = {
            key: list(state["found_inf_per_device"].values())
            for key, state in states.items()
            if state["found_inf_per_device"]
        }
        given_up = any(map(self._is_given_up, states.values()))
        wanted = self._on_no_gradients == "raise" and not flags
        if new_scale is None and (wanted or given_up):
            message = "No inf checks were recorded prior to update."
            raise AssertionError(f"{message} {_GIVEN_UP}" if given_up else message)
        outcome = None
        if flags or new_scale is None:
            outcome = self._outcome(flags)
        # First: a step that is interrupted from here on is over, and is not counted
        # twice if update() is called again.
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        report = None
        if outcome is not None:
            report = self._advance(outcome, moves=new_scale is None)
        if isinstance(new_scale, float):
            self._scale.fill_(new_scale)
        elif new_scale is not None:
            self._scale.copy_(new_scale.reshape(()))
        if report is not None:
            self._history.add(report)

    def _is_given_up(self, state: dict[str, Any]) -> bool:
        """Whether unscaling has failed, or was interrupted."""
        facts = self._iteration.of(state)
        return facts.given_up or facts.unscaling

    def _checked(self, new_scale: Any) -> float | torch.Tensor:
        """Return a scale that somebody wants to go on with, or raise."""
        if isinstance(new_scale, float):
            return validation.as_float32(validation.check_scale("new_scale", new_scale))
        reason = (
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
        if not isinstance(new_scale, torch.Tensor):
            message = (
                f"{reason} Got {validation.format_value(new_scale)}; write a float."
            )
            raise AttributeError(message)  # noqa: TRY004  # which is what torch raises
        kind = torch.device(self._device).type
        if (
            new_scale.device.type != kind
            or new_scale.numel() != 1
            or new_scale.requires_grad
        ):
            raise AssertionError(reason)
        if kind == "cpu":
            validation.check_scale("new_scale", float(new_scale))
        return new_scale

    def _outcome(self, flags: dict[int, list[Any]]) -> "_Outcome":
        """Return what this iteration has come to, from the flags of its optimizers."""
        parts = []
        if not flags:  # a step without gradients counts as finite
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
            stepped = (
                state is None
                or state["stage"] is OptState.STEPPED
                or self._overrides("step")  # which may not say so
            )
            parts.append(part._replace(stepped=stepped))
        every = [flag for own in flags.values() for flag in own]
        skipped = every[0].reshape(()) if len(every) == 1 else self._any(every)
        # No-op unless a subclass put the flag on another device or in another dtype.
        skipped = skipped.to(self._scale.device, torch.float32)
        found, held = self._overflowed(parts, skipped)
        raw_loss = self._raw_loss()
        loss_seen = None if raw_loss is None else parts[0].verdict.buffer[LOSS]
        flags_found = Flags(found, skipped, self._lost(), held, raw_loss, loss_seen)
        return _Outcome(parts, flags_found, self._iteration.loss_nonfinite)

    def _raw_loss(self) -> Any:
        """Return one number that is finite if the losses on the device are."""
        losses = self._iteration.raw_losses
        if not losses:
            return None
        device = self._scale.device
        flat = [
            loss.reshape(()).to(device, torch.float32, non_blocking=True)
            for loss in losses
        ]
        return flat[0] if len(flat) == 1 else torch.stack(flat).abs().amax()

    def _advance(self, outcome: "_Outcome", *, moves: bool) -> StepReport:
        """Move the scale by what was found; return the report of the step."""
        self._begun += 1
        parts, happened, loss_nonfinite = outcome
        rule = self._current_rule() if moves else _UNMOVED
        rule.advance(self._cells(), happened, lambda: self._signal(happened, parts))
        for part in parts:
            part.verdict.publish(self._shelf)
        lost = None
        if happened.loss is not None:
            buffer = eager.flag_buffer(happened.loss, self._scale)
            lost = Verdict(buffer, measured=False)
            lost.publish(self._shelf)
        return StepReport(
            self._begun, tuple(parts), self._names, lost, loss_nonfinite=loss_nonfinite
        )

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


class _Outcome(NamedTuple):
    """What one iteration has come to."""

    parts: list[Part]
    flags: Flags
    loss_nonfinite: bool | None
    """Whether a loss was not finite, if the host knows."""


_GIVEN_UP = (
    "An earlier unscale_() failed and its gradients were discarded. To go on, call "
    "optimizer.zero_grad() and scaler.discard(), on all ranks if there are several."
)

_UNMOVED = Rule(Fixed(), wide=False)
"""Counts a step, and leaves the scale to the caller."""
