# SPDX-License-Identifier: Apache-2.0
"""How a scaler looks at gradients, under torch's private names.

Others override or call some of these names, so they stay what they are in torch:
`_unscale_grads_`, `_check_inf_per_device` and `_found_inf_per_device`. Flags are 0.0 or
1.0, one for each device; what else a look has found out is kept as a `Verdict` in the
book of the iteration.
"""

from contextlib import suppress
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState

from lossscale.torch import eager, headroom
from lossscale.torch.agreeing import Agreeing
from lossscale.torch.eager import Request
from lossscale.torch.gradients import (
    Sorted,
    collected,
    inverse_of,
    parameters,
)
from lossscale.torch.sharding import settle
from lossscale.torch.steps import Part, name_of, weakly
from lossscale.torch.verdict import Verdict


class Looking(Agreeing):
    """Looks at the gradients of optimizers."""

    _only_checking = False
    """Whether `_unscale_grads_` is called with gradients that stay scaled."""

    def _begin(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer for a call that goes on with its iteration.

        An earlier call that raised or was interrupted half-way is settled first. If it
        was `step` and a backward pass has brought new gradients since, these are
        checked and unscaled as usual; if the optimizer raised and its gradients are
        the same, they are stepped again. Anything else is refused: what became of the
        gradients, or of the weights, is not known.
        """
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        facts = self._iteration.of(state)
        problem = ""
        if self._iteration.accumulating:
            problem = "accumulate() was interrupted."
        elif facts.unscaling and not facts.given_up:
            problem = "Unscaling the gradients of this optimizer was interrupted."
        elif facts.stepping is not None:
            unscaled = state["stage"] is not OptState.READY
            if facts.stepping.is_replaced(optimizer):
                self._rearm(optimizer)
            elif not facts.raised:
                problem = (
                    "step() of this optimizer was interrupted: whether its gradients "
                    "have been applied is not known."
                )
            elif unscaled and facts.stepping.is_rewritten(optimizer):
                problem = (
                    "step() of this optimizer raised after its gradients were "
                    "unscaled, and they have been written to since: whether they are "
                    "scaled is not known."
                )
        if problem:
            message = f"{problem} {_HOW_TO_GO_ON}"
            raise RuntimeError(message)
        facts.stepping, facts.raised = None, False
        return state

    def _rearm(self, optimizer: Any) -> None:
        """Check and unscale the next gradients of an optimizer from scratch."""
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.READY
        facts = self._iteration.of(state)
        facts.divisor, facts.clipped, facts.stepping = None, False, None
        facts.given_up = facts.unscaling = False
        facts.unscaled = None

    def _ready(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer whose gradients are as they came."""
        state = self._begin(optimizer)
        if state["stage"] is OptState.UNSCALED:
            message = (
                "unscale_() has already been called on this optimizer since the last "
                "update()."
            )
            raise RuntimeError(message)
        if state["stage"] is OptState.STEPPED:
            message = "unscale_() is being called after step()."
            raise RuntimeError(message)
        return state

    def _overrides(self, name: str) -> bool:
        """Whether a subclass, or somebody from outside, has a method of its own."""
        method = getattr(type(self), name)
        return name in vars(self) or not method.__module__.startswith(f"{__package__}.")

    def _gradients(self, optimizer: Any) -> tuple[Sorted | None, list[Any]]:
        """Return an optimizer's gradients and how they are sorted; `None` if none."""
        plan = self._plan(optimizer)
        shares = None
        if plan is not None:
            every = parameters(optimizer)
            settle(every)
            shares = plan.shares(every)
        gradients = collected(optimizer)
        if not gradients:
            return None, gradients
        try:
            known = self._sorted.get(optimizer)
        except TypeError:  # nothing to remember it by
            known = None
        if known is None or not known.fits(gradients, shares):
            known = Sorted(gradients, self._captured, shares)
            with suppress(TypeError):
                self._sorted[optimizer] = known
        # Its dtypes are those of the state, which the first step makes.
        kept = len(getattr(optimizer, "state", ()))
        if known.kept != kept and not known.foreign:
            those = [p for p in parameters(optimizer) if p.grad is not None]
            known.set_bounds(headroom.bounds(optimizer, those))
            known.kept = kept
        if known.sparse:
            # An index that stands more than once is added up, as optimizers do; the
            # sum may be infinite where no part of it is.
            for parameter in parameters(optimizer):
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
            gradients = collected(optimizer)
        return known, gradients

    def _look(
        self,
        optimizer: Any,
        request: Request,
        *,
        allow_fp16: bool,
        inverse: Any = None,
        gathered: tuple[Sorted | None, list[Any]] | None = None,
    ) -> dict[Any, Any]:
        """Look at the gradients of an optimizer; return the flag of each device.

        Args:
            optimizer: Whose gradients.
            request: What is wanted.
            allow_fp16: Whether float16 gradients may be unscaled.
            inverse: What unscales them, if not the scaler's scale.
            gathered: What `_gradients` returned, if it was asked already.
        """
        known, gradients = gathered or self._gradients(optimizer)
        plan = self._plan(optimizer)
        if known is None and plan is None:
            return self._nothing(optimizer)
        if known is not None:
            self._refuse(optimizer, known, allow_fp16=allow_fp16)
        if self._measure_norm:
            request = request._replace(with_norm=True)
        if self._measure_amax:
            request = request._replace(with_amax=True)
        if self._enabled and not self._rule.is_ours:
            request = request._replace(with_norm=True, with_amax=True)
        carried = (self._scale if inverse is None else None), inverse
        try:
            if known is not None and known.foreign:
                found = self._look_as_torch(optimizer, request, inverse)
                return self._agree_on_flags(plan, found)
            if plan is not None:
                buffer, found = self._measure(plan, known, gradients, carried, request)
            else:
                buffer, found = cast("Sorted", known).measure(
                    gradients, *carried, request
                )
                self._with_loss(found)
        except BaseException:
            if request.write:
                self._give_up(optimizer)
            raise
        self._keep(optimizer, buffer, gradients, known)
        return found

    def _refuse(self, optimizer: Any, known: Sorted, *, allow_fp16: bool) -> None:
        """Raise for gradients that must not be looked at as they are."""
        if not (known.half and not allow_fp16) and not known.overlapping:
            return
        state = self._per_optimizer_states.get(id(optimizer))
        if state is not None:
            self._iteration.of(state).unscaling = False  # nothing was changed
        if known.half and not allow_fp16:
            self._refuse_half(optimizer, known)
        if known.overlapping:
            message = (
                "unsupported operation: more than one element of the written-to tensor "
                "refers to a single memory location. Please clone() the tensor before "
                "performing the operation. (It is a gradient that was expanded.)"
            )
            raise RuntimeError(message)

    def _give_up(self, optimizer: Any) -> None:
        """Have gradients never unscaled again that may have been, in part or in full.

        Another rank did not answer, or a device failed. There is no flag, so `step`
        and `update` refuse; weights and scale are as before.
        """
        state = self._per_optimizer_states.get(id(optimizer))
        if state is not None:
            state["stage"] = OptState.UNSCALED
            state["found_inf_per_device"] = {}
            self._iteration.of(state).given_up = True
            # Nobody can tell what is left of them; a new backward pass brings others.
            for parameter in parameters(optimizer):
                parameter.grad = None

    def _with_loss(self, found: dict[Any, Any]) -> dict[Any, Any]:
        """Have a loss that was not finite skip the step as well."""
        if self._iteration.loss is not None:
            for flag in found.values():
                torch.maximum(flag, self._iteration.loss.to(flag.device), out=flag)
        return found

    def _keep(
        self,
        optimizer: Any,
        buffer: Any,
        gradients: list[Any],
        known: Sorted | None,
    ) -> None:
        """Keep a verdict for the report of this step."""
        places = None
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        if total != len(gradients):
            every = parameters(optimizer)
            places = [at for at, p in enumerate(every) if p.grad is not None]
        bounds = None if known is None else known.bounds
        self._note(optimizer, Verdict(buffer, places, bounds))

    def _note(self, optimizer: Any, verdict: Verdict) -> None:
        """Write a verdict into the state of an optimizer, in place of an older one."""
        # Not if there is none: to ask torch's dictionary for it would open one.
        state = self._per_optimizer_states.get(id(optimizer))
        if state is not None:
            facts = self._iteration.of(state)
            facts.part = Part(weakly(optimizer), verdict)
            facts.divisor, facts.clipped = None, False

    def _nothing(self, optimizer: Any) -> dict[Any, Any]:
        """Return the flags of a step without a gradient."""
        if self._on_no_gradients == "raise" or self._scale is None:
            return {}
        flag = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        verdict = Verdict(eager.flag_buffer(flag, self._scale), measured=False)
        self._note(optimizer, verdict)
        return {flag.device: flag}

    def _look_as_torch(
        self, optimizer: Any, request: Request, inverse: Any
    ) -> dict[Any, Any]:
        """Leave tensors of a kind of their own to torch."""
        device = (self._scale if inverse is None else inverse).device
        zero = torch.zeros((), dtype=torch.float32, device=device)
        if not request.write:
            inverse = torch.ones_like(zero)
        elif inverse is None:
            inverse = inverse_of(self._scale)
        found: dict[Any, Any] = super()._unscale_grads_(optimizer, inverse, zero, True)
        return self._with_loss(found)

    def _refuse_half(self, optimizer: Any, known: Sorted) -> None:
        """Say which gradients are float16, and what to do about it."""
        every = [at for at, p in enumerate(parameters(optimizer)) if p.grad is not None]
        names = [name_of(optimizer, every[at], self._names) for at in known.half[:6]]
        more = len(known.half) - len(names)
        message = (
            "Attempting to unscale FP16 gradients. The gradients of "
            f"{', '.join(names)}{f' and {more} more' if more else ''} are float16. "
            "Either keep the parameters in float32 and run the forward pass under "
            "torch.autocast, or, to unscale them in float16 all the same, write "
            "GradScaler(..., allow_fp16=True)."
        )
        raise ValueError(message)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> dict[Any, Any]:
        allowed = allow_fp16 or self._allow_fp16
        found = self._look(
            optimizer,
            Request(write=True, headroom=not self._only_checking),
            allow_fp16=allowed,
            inverse=inv_scale.reshape(()).to(torch.float32),
        )
        # torch hands copies of `found_inf` back, of its shape and with what it holds.
        return {
            device: torch.maximum(found_inf.to(device), flag)
            for device, flag in found.items()
        }

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states[id(optimizer)]
        flags: dict[Any, Any] = {}
        if self._overrides("_unscale_grads_"):
            # It is asked with an inverse of 1, as torch does, and cannot know what
            # dividing by the scale will make of the gradients.
            self._only_checking = True
            try:
                flags = super()._check_inf_per_device(optimizer)
            finally:
                self._only_checking = False
        found = self._look(optimizer, Request(), allow_fp16=True)
        for device, flag in flags.items():
            # A device may have no gradient that anybody but the optimizer knows of.
            own = found.setdefault(device, flag.reshape(()))
            torch.maximum(own, flag.reshape(()), out=own)
        if self._overrides("_unscale_grads_"):
            # Also where it has returned no flag: the other ranks ask.
            found = self._agree_on_flags(self._plan(optimizer), found)
        state["found_inf_per_device"] = found
        return found

    def _any(self, flags: list[Any]) -> Any:
        """Return 1.0 if any flag is not 0, else 0.0, exactly, where the scale is."""
        device = self._scale.device
        if not flags:
            return torch.zeros((), dtype=torch.float32, device=device)
        # What goes to the host is read at once, so it is waited for.
        late = device.type != "cpu"
        there = [
            flag.to(device, torch.float32, non_blocking=late).reshape(())
            for flag in flags
        ]
        together = there[0] if len(there) == 1 else torch.stack(there).amax()
        return (together != 0).to(torch.float32)


_HOW_TO_GO_ON = (
    "To go on, call optimizer.zero_grad() and scaler.discard(), on all ranks if there "
    "are several, then run a new backward pass."
)
