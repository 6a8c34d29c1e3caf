# SPDX-License-Identifier: Apache-2.0
"""torch's side of `GradScaler`: its methods, errors, state dict and private names.

What is meant by each is in torch's own documentation. Others override or call some of
the private ones, so they stay what they are: `_unscale_grads_`, `_maybe_opt_step`,
`_check_inf_per_device`, `_found_inf_per_device`, `_lazy_init_scale_growth_tracker`,
`_per_optimizer_states`, `_scale` and `_growth_tracker`, which are changed in place.

Beside `_per_optimizer_states` there is a second book of what an iteration has come to
so far, `_Iteration`; both are closed by `update`.
"""

import warnings
from collections import defaultdict
from contextlib import suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from lossscale.core import checks
from lossscale.core.errors import LossScaleError, SettingError, StateError
from lossscale.core.policies import Fixed, Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState, Signal
from lossscale.torch import accumulation, closures, eager, handover
from lossscale.torch.compiling import uncompiled
from lossscale.torch.eager import Request
from lossscale.torch.gradients import Sorted, collected, inverse_of, parameters
from lossscale.torch.rules import Cells, Flags, Rule, shown_factors, torchs_policy
from lossscale.torch.steps import History, Names, Part, StepReport, name_of, weakly
from lossscale.torch.verdict import AMAX, NAN, NORM, Shelf, Verdict


class _Iteration:
    """What one iteration has come to so far, for each optimizer by its id."""

    def __init__(self) -> None:
        self.verdicts: dict[int, Part] = {}
        self.divisors: dict[int, Any] = {}
        """What divides the gradients of an optimizer that were left as they are."""
        self.clipped: set[int] = set()
        self.settled: set[int] = set()
        """Optimizers whose gradients were looked at for a step that is to follow."""
        self.sums: dict[int, accumulation.Sum] = {}
        self.dropped: list[Any] = []
        """The flags of micro-batches: a bad one lowers the scale, and skips nothing."""
        self.lost: list[Any] = []
        """The same of those whose loss was not finite: they leave the scale."""
        self.loss: Any = None
        """1.0 if a loss was not finite; `None` if nobody looked."""


class DropIn(torch.amp.GradScaler):
    """torch's methods; `GradScaler` adds its own."""

    def __init__(
        self,
        device: str,
        numbers: tuple[float, float, float, int],
        enabled: bool,
        policy: Policy | None,
        history: History,
        names: Names | None,
        on_no_gradients: str,
        allow_fp16: bool,
        measure_norm: bool,
    ) -> None:
        super().__init__(device, *numbers, enabled=enabled)
        self._history = history
        self._names = names
        self._on_no_gradients = on_no_gradients
        self._allow_fp16 = allow_fp16
        self._measure_norm = measure_norm
        self._begun = 0
        """How many steps `update` has seen in this process."""
        self._iteration = _Iteration()
        self._sorted: Any = WeakKeyDictionary()
        self._schedulers: Any = WeakKeyDictionary()
        self._shelf = Shelf()
        if not self._enabled:
            return
        self._per_optimizer_states: Any = defaultdict(_refresh_per_optimizer_state)
        self._given_policy = policy
        if policy is not None:
            self._init_scale = float(policy.init().scale)
            factors = shown_factors(policy)
            self._growth_factor, self._backoff_factor, self._growth_interval = factors
        self._rule = self._made_rule()
        self._init_bad = 0
        self._init_counters: tuple[int, ...] = (0, 0, 0)
        self._bad: Any = None
        self._counters: Any = None

    # -- the rule and its settings -----------------------------------------------------

    def _made_rule(self) -> Rule:
        """Return the rule that the settings stand for."""
        self._rule_of = self._numbers()
        if self._given_policy is not None:
            return Rule(self._given_policy, wide=False)
        return Rule(torchs_policy(self._init_scale, *self._rule_of), wide=True)

    def _numbers(self) -> tuple[float, float, int]:
        return self._growth_factor, self._backoff_factor, self._growth_interval

    def _current_rule(self) -> Rule:
        """Return the rule; made anew if somebody has set a number by hand."""
        if self._given_policy is None and self._numbers() != self._rule_of:
            self._rule = self._made_rule()
        return self._rule

    def _set(self, name: str, value: Any) -> None:
        """Set one of torch's numbers, unless it is of no use."""
        if self._given_policy is not None:
            message = (
                f"This scaler has a policy of its own, {self._given_policy!r}; give a "
                f"new GradScaler a policy with another {name}."
            )
            raise SettingError(message)
        before = getattr(self, f"_{name}")
        setattr(self, f"_{name}", value)
        try:
            self._rule = self._made_rule()
        except LossScaleError:
            setattr(self, f"_{name}", before)
            raise
        if self._scale is not None:
            self._rule.prepare(self._scale.device)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor; it must be above 1."""
        self._set("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the back-off factor; it must lie between 0 and 1."""
        self._set("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval. At or below the steps counted, growth comes next."""
        self._set("growth_interval", new_interval)

    # -- the state ---------------------------------------------------------------------

    @uncompiled
    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._cells()
        self._rule.prepare(self._scale.device)

    def _cells(self) -> Cells:
        """Return the tensors of the state; ours are made where torch's are."""
        device = self._scale.device
        if self._bad is None or self._bad.device != device:
            self._bad = torch.full((), self._init_bad, dtype=torch.int32, device=device)
            # Not torch.tensor(..., device): that copies, which a graph cannot capture.
            self._counters = torch.zeros(3, dtype=torch.int32, device=device)
            for at, count in enumerate(self._init_counters):
                self._counters[at].fill_(count)
        return Cells(self._scale, self._growth_tracker, self._bad, self._counters)

    def _counted(self) -> tuple[int, ...]:
        """Return steps, skipped steps and skipped steps in a row; waits for them."""
        if not self._enabled:
            return (0, 0, 0)
        if self._counters is None:
            return self._init_counters
        return tuple(self._counters.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and four of ours; torch reads it and skips them.

        Entries: `scale`, `growth_factor`, `backoff_factor`, `growth_interval`,
        `_growth_tracker`; `bad` (overflows counted towards a back-off), `steps`,
        `skipped`, `consecutive_skips`. Empty if the scaler is disabled.
        """
        state: dict[str, Any] = super().state_dict()
        if self._enabled:
            bad = self._init_bad if self._bad is None else self._bad.item()
            counted = zip(_COUNTERS, self._counted(), strict=True)
            state |= {"bad": bad, **dict(counted)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of this class or of torch's returned.

        A scaler that was made with `policy=` keeps its policy and takes the numbers of
        the state alone; otherwise torch's three settings are taken as well.

        Raises:
            StateError: If a number is of no use, such as a scale of 0; nothing changes.
        """
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)  # which says what torch says
            return
        numbers = tuple(state_dict[name] for name in _SETTINGS)
        state = ScaleState(
            state_dict["scale"], state_dict["_growth_tracker"], state_dict.get("bad", 0)
        )
        policy = self._given_policy
        if policy is None:
            try:
                policy = torchs_policy(2.0**16, *numbers)
            except LossScaleError as error:
                raise StateError(str(error)) from error
        else:
            numbers = self._numbers()
        scale, good, bad = check_state(policy, state)
        counted = tuple(int(state_dict.get(name, 0)) for name in _COUNTERS)
        taken = {**dict(zip(_SETTINGS, numbers, strict=True)), "scale": scale}
        super().load_state_dict({**taken, "_growth_tracker": good})
        self._init_bad, self._init_counters = bad, counted
        self._bad = self._counters = None
        self._rule = self._made_rule()
        if self._scale is not None:
            self._cells()
            self._rule.prepare(self._scale.device)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: numbers and settings; no names or observers."""
        state: dict[str, Any] = super().__getstate__()
        if self._enabled:
            state["_init_bad"] = self.state_dict()["bad"]
            state["_init_counters"] = self._counted()
            state["_bad"] = state["_counters"] = None
            state["_rule"] = Rule(self._rule.policy, wide=self._given_policy is None)
        state["_history"] = self._history.emptied()
        state["_names"] = None
        for name in ("_iteration", "_sorted", "_schedulers", "_shelf"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on from what was pickled."""
        super().__setstate__(state)
        self._iteration = _Iteration()
        self._sorted, self._schedulers = WeakKeyDictionary(), WeakKeyDictionary()
        self._shelf = Shelf()

    # -- looking at gradients ----------------------------------------------------------

    @uncompiled
    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of an optimizer, in place; waits for nothing."""
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._ready(optimizer)
        if id(optimizer) in self._iteration.sums:
            accumulation.finish(self, optimizer)
        elif self._overrides("_unscale_grads_"):
            zero = torch.zeros((), dtype=torch.float32, device=self._scale.device)
            state["found_inf_per_device"] = self._unscale_grads_(
                optimizer, inverse_of(self._scale), zero, self._allow_fp16
            )
        else:
            state["found_inf_per_device"] = self._look(
                optimizer, Request(write=True), allow_fp16=self._allow_fp16
            )
        state["stage"] = OptState.UNSCALED

    def _ready(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer whose gradients are as they came."""
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
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
        return name in vars(self) or getattr(type(self), name) is not getattr(
            DropIn, name
        )

    def _gradients(self, optimizer: Any) -> tuple[Sorted | None, list[Any]]:
        """Return an optimizer's gradients and how they are sorted; `None` if none."""
        gradients = collected(optimizer)
        if not gradients:
            return None, gradients
        try:
            known = self._sorted.get(optimizer)
        except TypeError:  # nothing to remember it by
            known = None
        if known is None or not known.fits(gradients):
            known = Sorted(gradients)
            with suppress(TypeError):
                self._sorted[optimizer] = known
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
        if known is None:
            return self._nothing(optimizer)
        if known.half and not allow_fp16:
            self._refuse_half(optimizer, known)
        if known.foreign:
            return self._look_as_torch(optimizer, request, inverse)
        if self._measure_norm:
            request = request._replace(with_norm=True)
        if self._enabled and not self._rule.is_ours:
            request = request._replace(with_norm=True, with_amax=True)
        scale = self._scale if inverse is None else None
        buffer, found = known.measure(gradients, scale, inverse, request)
        self._with_loss(found)
        self._keep(optimizer, buffer, gradients)
        return found

    def _with_loss(self, found: dict[Any, Any]) -> dict[Any, Any]:
        """Have a loss that was not finite skip the step as well."""
        if self._iteration.loss is not None:
            for flag in found.values():
                torch.maximum(flag, self._iteration.loss.to(flag.device), out=flag)
        return found

    def _keep(self, optimizer: Any, buffer: Any, gradients: list[Any]) -> None:
        """Keep a verdict for the report of this step."""
        places = None
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        if total != len(gradients):
            every = parameters(optimizer)
            places = [at for at, p in enumerate(every) if p.grad is not None]
        part = Part(weakly(optimizer), Verdict(buffer, places))
        self._iteration.verdicts[id(optimizer)] = part

    def _nothing(self, optimizer: Any) -> dict[Any, Any]:
        """Return the flags of a step without a gradient."""
        if self._on_no_gradients == "raise" or self._scale is None:
            return {}
        flag = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        verdict = Verdict(eager.flag_buffer(flag, self._scale), measured=False)
        self._iteration.verdicts[id(optimizer)] = Part(weakly(optimizer), verdict)
        return {flag.device: flag}

    def _look_as_torch(
        self, optimizer: Any, request: Request, inverse: Any
    ) -> dict[Any, Any]:
        """Leave tensors of a kind of their own, such as DTensor, to torch."""
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
            Request(write=True),
            allow_fp16=allowed,
            inverse=inv_scale.reshape(()),
        )
        # torch hands copies of `found_inf` back, of its shape and with what it holds.
        return {
            device: torch.maximum(found_inf.to(device), flag)
            for device, flag in found.items()
        }

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        if self._overrides("_unscale_grads_"):
            found: dict[Any, Any] = super()._check_inf_per_device(optimizer)
            return found
        self._check_scale_growth_tracker("_check_inf_per_device")
        found = self._look(optimizer, Request(), allow_fp16=True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    # -- stepping ----------------------------------------------------------------------

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
        closure = kwargs.pop("closure", None)
        if closure is None and args and callable(args[0]):
            closure, args = args[0], args[1:]
        if closure is None:
            self._check_scale_growth_tracker("step")
        state = self._unstepped(optimizer)
        if closure is not None:
            result = closures.step(self, optimizer, closure, *args, **kwargs)
        elif handover.takes_scale(optimizer):
            result = self._step_handed_over(optimizer, state, *args, **kwargs)
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
        """Have the gradients of an optimizer looked at, if they have not been."""
        self._iteration.settled.add(id(optimizer))
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            return
        if id(optimizer) in self._iteration.sums:
            self.unscale_(optimizer)
        elif handover.takes_scale(optimizer):
            self._check_inf_per_device(optimizer)
        else:
            self.unscale_(optimizer)

    def _step_handed_over(
        self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step an optimizer that unscales and skips by itself; nothing waits."""
        if handover.takes_scaler(optimizer):
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to "
                "the passed optimizer. In the near future GradScaler registers "
                "`grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer "
                "and let the optimizer use them directly.",
                FutureWarning,
                stacklevel=4,
            )
            return optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        if id(optimizer) not in self._iteration.settled:
            self._settle(optimizer)
        found = self._any(list(state["found_inf_per_device"].values()))
        divisor = self._iteration.divisors.get(id(optimizer))
        if divisor is None and state["stage"] is OptState.READY:
            divisor = self._scale
        if not handover.prepare_momentum(optimizer, found):
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
        elif self._iteration.divisors.pop(id(optimizer), None) is not None:
            # The closure has clipped them, and nobody else will.
            known, gradients = self._gradients(optimizer)
            verdict = self._iteration.verdicts[id(optimizer)].verdict
            cast("Sorted", known).multiply_(gradients, verdict.buffer)
        found = state["found_inf_per_device"]
        if not found:
            message = "No inf checks were recorded for this optimizer."
            raise AssertionError(message)
        return not any(flag.item() for flag in found.values())

    def _rearm(self, optimizer: Any) -> None:
        """Have the next gradients of an optimizer looked at anew."""
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
        self._iteration.clipped.discard(id(optimizer))
        self._iteration.divisors.pop(id(optimizer), None)

    def _judge_sum(self, optimizer: Any, total: Any) -> None:
        """Look at what micro-batches add up to: the sum may be infinite as well."""
        one = torch.ones((), dtype=torch.float32, device=self._scale.device)
        request = Request(with_amax=True)
        found = self._look(optimizer, request, allow_fp16=True, inverse=one)
        none_good = (total.good == 0).to(torch.float32)
        for flag in found.values():
            torch.maximum(flag, none_good.to(flag.device), out=flag)
        part = self._iteration.verdicts.get(id(optimizer))
        if part is not None:
            part.verdict.add(total.tops, self._scale, none_good)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found

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
        if new_scale is None and not flags and self._on_no_gradients == "raise":
            message = "No inf checks were recorded prior to update."
            raise AssertionError(message)
        report = None
        if flags or new_scale is None:
            report = self._advance(flags, moves=new_scale is None)
        if isinstance(new_scale, float):
            self._scale.fill_(new_scale)
        elif new_scale is not None:
            self._scale.copy_(new_scale.reshape(()))
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._iteration = _Iteration()
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
            part = self._iteration.verdicts.get(key)
            if part is None:
                # An optimizer or a subclass has recorded the flag by itself.
                buffer = eager.flag_buffer(flag.reshape(()), self._scale)
                part = Part(lambda: None, Verdict(buffer, measured=False))
            elif len(own) > 1 or flag.data_ptr() != part.verdict.found.data_ptr():
                part.verdict.found.copy_(flag.reshape(()))
            parts.append(part)
        every = [flag for own in flags.values() for flag in own]
        skipped = every[0].reshape(()) if len(every) == 1 else self._any(every)
        if skipped.device != self._scale.device:
            skipped = skipped.to(self._scale.device)
        found, loss = self._moving(skipped)
        rule = self._current_rule() if moves else _UNMOVED
        happened = Flags(found, skipped, loss)
        rule.advance(self._cells(), happened, lambda: self._signal(happened, parts))
        for part in parts:
            part.verdict.publish(self._shelf)
        lost = None
        if loss is not None:
            lost = Verdict(eager.flag_buffer(loss, self._scale), measured=False)
            lost.publish(self._shelf)
        return StepReport(self._begun, tuple(parts), self._names, lost)

    def _moving(self, skipped: Any) -> tuple[Any, Any]:
        """Return what moves the scale: a gradient, or a loss, that was not finite."""
        iteration = self._iteration
        found = skipped
        if iteration.dropped:
            found = self._any([skipped, *iteration.dropped])
        if not iteration.lost:
            return found, iteration.loss
        # The loss keeps the scale where it is, unless gradients overflowed as well.
        overflowed = self._any(iteration.dropped)
        return found, self._any(iteration.lost) * (1.0 - overflowed)

    def _signal(self, happened: Flags, parts: list[Part]) -> Signal:
        """Return what a policy is told, in full only where it may look at it."""
        lost = happened.loss
        signal = Signal(
            finite=happened.found == 0, loss_finite=None if lost is None else lost == 0
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

    def _any(self, flags: list[Any]) -> Any:
        """Return 1.0 if any flag is not 0, else 0.0, exactly, where the scale is."""
        device = self._scale.device
        if not flags:
            return torch.zeros((), dtype=torch.float32, device=device)
        there = [flag.to(device, non_blocking=True).reshape(()) for flag in flags]
        together = there[0] if len(there) == 1 else torch.stack(there).amax()
        return (together != 0).to(torch.float32)


_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_COUNTERS = ("steps", "skipped", "consecutive_skips")
_UNMOVED = Rule(Fixed(), wide=False)
"""Counts a step, and leaves the scale to the caller."""
