# SPDX-License-Identifier: Apache-2.0
"""`GradScaler`: torch's class, with one look at the gradients and nothing corrupted.

It is a `torch.amp.GradScaler`; what torch's has stands in `drop_in`, `looking` and
`keeping`, what is new stands here. The rooms beside: `gradients` looks at gradients (by
the `kernels` or `eager`), `rules` moves the scale, `handover` deals with fused
optimizers, `steps` reports; `clipping`, `closures` and `accumulation` do what they are
called.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import torch

from lossscale.core import validation
from lossscale.core.policies import Fixed, Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState
from lossscale.errors import ContextError, SettingTypeError
from lossscale.torch import accumulation, clipping, handover
from lossscale.torch.arguments import check_optimizer, check_policy, named
from lossscale.torch.attributes import computed
from lossscale.torch.compiling import uncompiled
from lossscale.torch.drop_in import DropIn
from lossscale.torch.gradients import inverse_of
from lossscale.torch.ranks import declared
from lossscale.torch.sharding import is_sharded
from lossscale.torch.steps import History, Observer, StepReport

Outputs = TypeVar("Outputs")
"""A tensor, or an iterable of tensors."""


class GradScaler(DropIn):
    """A `torch.amp.GradScaler` that reads the gradients once and says what happened.

    With torch's arguments alone it takes torch's steps, to the bit, except where torch
    goes wrong; the page "PyTorch: what differs from torch" lists where.

    Example:
        >>> import torch, lossscale.torch as ls
        >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = ls.GradScaler("cpu")
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     scaler.scale((weight**2).sum()).backward()
        ...     norm = scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        ...     scaler.step(optimizer)
        ...     scaler.update()
        >>> scaler.last_step.applied, round(scaler.last_step.norm, 3), scaler.skipped
        (True, 2.0, 0)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        state: ScaleState | None = None,
        observer: Observer | None = None,
        names: Iterable[tuple[str, Any]] | Mapping[str, Any] | None = None,
        module: torch.nn.Module | None = None,
        on_no_gradients: Literal["raise", "clean step"] = "raise",
        allow_fp16: bool = False,
        measure_norm: bool = False,
        measure_amax: bool = False,
        max_consecutive_skips: int | None = 100,
        on_collapse: Literal["warn", "raise"] = "warn",
        process_group: Any = None,
        meshes: Any = None,
        sharded: Any = None,
    ) -> None:
        """Make a scaler; its state goes to the device of the first scaled tensor.

        Args:
            device: The kind of device, as torch has it.
            init_scale: The scale to start with.
            growth_factor: What it is multiplied by after enough clean steps.
            backoff_factor: What it is multiplied by after a skipped step.
            growth_interval: How many clean steps in a row make it grow.
            enabled: If not, every method does what it would without a scaler.
            policy: Any policy, in place of the four numbers above.
            state: A state to go on from, such as one that `from_portable` returned.
            observer: Called with the `StepReport` of every step, in order, when its
                numbers have arrived: on a GPU a step late, without a wait.
            names: The names of parameters, as `module.named_parameters()` gives them.
            module: The module whose parameters have the names.
            on_no_gradients: "raise", as torch does when a step finds no gradient at
                all, or "clean step", which counts it as one.
            allow_fp16: Unscale float16 gradients in place; torch refuses them.
            measure_norm: Measure the norm on every step, also where that takes another
                read of the gradients. (The kernels on a GPU measure it anyway.)
            measure_amax: Measure the largest magnitude of the gradients on every step,
                also where that takes another read. (The kernels do it anyway.)
            max_consecutive_skips: After so many skipped steps in a row the alarm goes
                off; `None` for none.
            on_collapse: What the alarm does: "warn", once in a row of skipped steps, or
                "raise", every so many.
            process_group: The ranks that skip together and have one scale: a process
                group, or several. DTensor parameters need none: they know their ranks.
            meshes: The same as a device mesh, or several; every dimension is a group.
            sharded: Those groups or meshes over which gradients that are no DTensors
                are parts of a whole, such as pipeline stages: their norms are added up.
                Without it such gradients are taken to be whole on every rank.

        Raises:
            SettingError: If a setting is of no use, or if a policy comes together with
                one of the numbers that it stands for.
            StateError: If the state is not one that the policy can go on from.
        """
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        ranks = declared(process_group, meshes, sharded)
        if policy is not None:
            check_policy(policy, numbers)
        validation.check_choice(
            "on_no_gradients", on_no_gradients, ("raise", "clean step")
        )
        validation.check_choice("on_collapse", on_collapse, ("warn", "raise"))
        if observer is not None and not callable(observer):
            message = (
                "observer must be a function of a StepReport, got "
                f"{validation.format_value(observer)}."
            )
            raise SettingTypeError(message)
        if max_consecutive_skips is not None:
            validation.check_count("max_consecutive_skips", max_consecutive_skips)
        super().__init__(
            device,
            numbers,
            enabled,
            policy,
            History(observer, max_consecutive_skips, on_collapse),
            named(names, module),
            on_no_gradients,
            validation.check_bool("allow_fp16", allow_fp16),
            validation.check_bool("measure_norm", measure_norm),
            validation.check_bool("measure_amax", measure_amax),
        )
        self._declared = ranks
        if state is not None and self._enabled:
            first = check_state(self._current_rule().policy, state)
            self._init_scale, self._init_growth_tracker, self._init_bad = first

    def __repr__(self) -> str:
        """Return the scale, the policy and the counts; waits for the device."""
        name = type(self).__name__
        if not self._enabled:
            return f"{name}(enabled=False)"
        _, (steps, skipped, _) = self._own_numbers()
        policy = self._current_rule().policy
        return (
            f"{name}(scale={self.get_scale():g}, policy={policy!r}, steps={steps}, "
            f"skipped={skipped})"
        )

    # -- what there is to know ---------------------------------------------------------

    @computed
    def policy(self) -> Policy:
        """The policy that moves the scale."""
        return self._current_rule().policy if self._enabled else Fixed(1.0)

    @computed
    def state(self) -> ScaleState:
        """The scale and its counters: tensors that the scaler goes on to change.

        Before the first `scale` they are Python numbers. Together with `policy` this is
        what `lossscale.to_portable` takes.
        """
        if not self._enabled:
            return ScaleState(1.0, 0, 0)
        if self._scale is None:
            return ScaleState(
                self._init_scale, self._init_growth_tracker, self._init_bad
            )
        return ScaleState(*self._cells()[:3])

    @computed
    def last_step(self) -> StepReport | None:
        """What became of the last step; `None` before the first `update`."""
        return self._history.last

    @computed
    def steps(self) -> int:
        """How many steps there were, skipped ones included; waits for the device."""
        return self._own_numbers()[1][0]

    @computed
    def skipped(self) -> int:
        """How many steps were skipped; waits for the device."""
        return self._own_numbers()[1][1]

    @computed
    def consecutive_skips(self) -> int:
        """How many were skipped since the last applied one; waits for the device."""
        return self._own_numbers()[1][2]

    def gate(self) -> torch.Tensor:
        """Return whether the last step was applied, as a boolean tensor.

        It stays on the device: `torch.where(scaler.gate(), new, old)` and
        `average.lerp_(weight, 0.01 * scaler.gate())` wait for nothing, while
        `if scaler.gate():` does. True before the first step.

        Example:
            >>> import lossscale.torch as ls
            >>> ls.GradScaler("cpu").gate()
            tensor(True)
        """
        last = self._history.last
        if last is None or not last.parts:
            scale = self._scale if self._enabled else None
            device = "cpu" if scale is None else scale.device
            return torch.ones((), dtype=torch.bool, device=device)
        applied = self._any([part.verdict.found for part in last.parts]) == 0
        return applied & all(part.stepped for part in last.parts)

    def step_scheduler(
        self, scheduler: Any, *arguments: Any, wait: bool = False
    ) -> None:
        """Step a scheduler for every step that its optimizer took, and for no other.

        Call it after every `update`, in place of `scheduler.step()`; a schedule per
        epoch keeps `scheduler.step()`. On a GPU the host knows one step later whether a
        step was taken; there the rate may change one step late, and nothing waits. With
        `wait` it is never late.

        Args:
            scheduler: A scheduler of an optimizer that this scaler steps.
            *arguments: What `scheduler.step` takes, such as a metric.
            wait: Wait for the device.
        """
        if not self._enabled:
            scheduler.step(*arguments)
            return
        if not self._begun and self._overrides("update"):
            message = (
                f"{type(self).__name__} has an update() of its own that never called "
                "GradScaler's, so no step is known here. Call super().update() in it, "
                "or scheduler.step()."
            )
            raise ContextError(message)
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:  # the one that Accelerate has prepared has several
            optimizer = scheduler.optimizers[0]
        self._history.receive(wait=wait)
        seen = self._schedulers.get(scheduler, self._begun - 1)
        taken, last = self._history.after(seen, handover.inner(optimizer))
        self._schedulers[scheduler] = last
        for _ in range(taken):
            scheduler.step(*arguments)

    def flush(self) -> None:
        """Wait for the device and hand every report on, to the observer first.

        Raises:
            CollapseError: As `update` does.
        """
        self._history.receive(wait=True)

    # -- scaling -----------------------------------------------------------------------

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or an iterable of tensors, by the scale; as torch does."""
        tensor: Any = outputs
        if self._enabled and type(tensor) is torch.Tensor:
            # torch.compile refuses to look into torch's own method.
            if self._scale is None:
                self._init_scale_on(tensor.device)
            scaled = tensor * self._scale.to(tensor.device, non_blocking=True)
        else:
            scaled = super().scale(outputs)
        if self._enabled and self._current_rule().checks_loss:
            self._check_loss(outputs)
        elif self._enabled and not torch.compiler.is_compiling():
            self._note_loss(outputs)
        if self._enabled and not torch.compiler.is_compiling():
            self._iteration.losses += 1
        return cast("Outputs", scaled)

    def _init_scale_on(self, device: torch.device) -> None:
        """Make torch's two tensors, also where that is being compiled."""
        if not torch.compiler.is_compiling():
            self._lazy_init_scale_growth_tracker(device)
            return
        scale, tracker = self._init_scale, self._init_growth_tracker
        self._scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.full((), tracker, dtype=torch.int32, device=device)

    def _note_loss(self, outputs: Any) -> None:
        """Keep for the report whether a loss was finite, where that costs no wait.

        Of one number: a vector is no loss, and to read all of it may take long.
        """
        if isinstance(outputs, (list, tuple)):
            for output in outputs:
                self._note_loss(output)
        elif type(outputs) is not torch.Tensor or outputs.numel() != 1:
            return
        elif outputs.device.type == "cpu":
            bad = not math.isfinite(outputs.item())
            self._iteration.loss_nonfinite = bad or bool(self._iteration.loss_nonfinite)
        else:
            self._iteration.raw_losses.append(outputs.detach())

    def _check_loss(self, outputs: Any) -> None:
        """Keep on the device whether a loss, before it was scaled, was not finite."""
        if isinstance(outputs, (list, tuple)):
            for output in outputs:
                self._check_loss(output)
        elif isinstance(outputs, torch.Tensor):
            with torch.no_grad():
                bad = (~torch.isfinite(outputs)).any().to(torch.float32)
                if is_sharded(bad):
                    bad = bad.full_tensor()
            known = [] if self._iteration.loss is None else [self._iteration.loss]
            self._iteration.loss = self._any([bad, *known])

    def grad(
        self,
        outputs: Any,
        inputs: Any,
        *,
        create_graph: bool = True,
        retain_graph: bool | None = None,
        allow_unused: bool = False,
    ) -> tuple[Any, ...]:
        """Return unscaled gradients, of which a gradient penalty can be made.

        The backward pass runs on scaled numbers; the result is divided by the scale as
        part of the graph, on the device. Add a penalty of it to the loss, then go on as
        usual with `scale`, `backward`, `step` and `update`.

        Args:
            outputs: The loss, or several.
            inputs: What to differentiate with respect to.
            create_graph: Keep the result differentiable.
            retain_graph: As `torch.autograd.grad` has it.
            allow_unused: Return `None` for an input that the outputs do not depend on.

        Example:
            >>> import torch, lossscale.torch as ls
            >>> scaler = ls.GradScaler("cpu")
            >>> x = torch.tensor(3.0, requires_grad=True)
            >>> (gradient,) = scaler.grad(x**2, x)
            >>> scaler.scale(x**2 + gradient**2).backward()
            >>> x.grad / scaler.get_scale()
            tensor(30.)
        """
        gradients = torch.autograd.grad(
            super().scale(outputs),
            inputs,
            create_graph=create_graph,
            retain_graph=retain_graph,
            allow_unused=allow_unused,
        )
        if not self._enabled:
            return tuple(gradients)
        inverse = inverse_of(self._scale)
        return tuple(
            None if gradient is None else gradient * inverse.to(gradient.device)
            for gradient in gradients
        )

    # -- gradients ---------------------------------------------------------------------

    @uncompiled
    def clip_grad_norm_(
        self,
        optimizer: Any,
        max_norm: float | Sequence[float],
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        write_back: bool = False,
    ) -> torch.Tensor:
        """Clip the norm of an optimizer's gradients; in place of `unscale_`.

        One read gives the norm, the check for what is not finite and the factor.
        Nothing waits. What `.grad` holds afterwards depends on the optimizer: a plain
        one's gradients are unscaled and clipped. A fused one divides by itself, so its
        gradients are left as they came, still scaled; pass `write_back=True`, or call
        `unscale_` afterwards, to have them unscaled and clipped as well.

        Args:
            optimizer: Whose gradients to clip; once a step, after all backward passes.
            max_norm: What their norm shall not exceed, unscaled. Infinity measures the
                norm and clips nothing. A list has one number for each parameter group,
                and every group is clipped by its own norm.
            norm_type: 2, infinity for the largest magnitude, or any positive number.
                Other norms than the first two, and norms of groups, take a second read
                of the gradients.
            error_if_nonfinite: Raise if the norm is not finite, instead of skipping the
                step; that waits for the device.
            write_back: Write unscaled, clipped gradients to `.grad` also for an
                optimizer that divides by itself.

        Returns:
            The norm of the unscaled gradients before clipping, on their device; 0 if
            there are none. If they are not finite it is infinite or NaN, and the step
            will be skipped. With a list, one norm for each parameter group.

        Raises:
            SettingError: If `max_norm` or `norm_type` is not positive.
            RuntimeError: With `error_if_nonfinite`, if the norm is not finite; the
                gradients are as they were.
        """
        wanted = clipping.check_arguments(
            check_optimizer("clip_grad_norm_", optimizer),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            write_back=write_back,
        )
        if not self._enabled:
            return clipping.clip_without_scale(optimizer, wanted)
        optimizer = handover.inner(optimizer)
        if self._scale is None and clipping.nothing_to_clip(self, optimizer):
            shape = (len(wanted.max_norms),) if wanted.per_group else ()
            return torch.zeros(shape, device="cpu")
        self._check_scale_growth_tracker("clip_grad_norm_")
        return clipping.clip(self, optimizer, wanted)

    @uncompiled
    def accumulate(self, optimizer: Any) -> None:
        """Add a micro-batch's gradients up, in float32 or wider, if they are finite.

        Call it after every `backward`. The gradients are unscaled, added to buffers and
        taken off the parameters; of a micro-batch with a gradient that is not finite
        nothing is added. `step` applies the sum of the good ones times all over good,
        as if none were missing, and skips only if none was good. `update` lowers the
        scale if any was dropped.

        Args:
            optimizer: Whose gradients to add up.
        """
        if not self._enabled:
            return  # the gradients add up where they are
        self._check_scale_growth_tracker("accumulate")
        optimizer = handover.inner(check_optimizer("accumulate", optimizer))
        self._ready(optimizer)
        accumulation.add(self, optimizer)

    @uncompiled
    def step_all(self, *optimizers: Any) -> list[Any]:
        """Step several optimizers, or none of them if any gradient is not finite.

        Returns:
            What each `optimizer.step` returned; `None` for those that were skipped.
        """
        if not self._enabled:
            return [optimizer.step() for optimizer in optimizers]
        for optimizer in optimizers:
            check_optimizer("step_all", optimizer)
        self._check_scale_growth_tracker("step_all")
        given, optimizers = optimizers, tuple(map(handover.inner, optimizers))
        states = [self._unstepped(optimizer) for optimizer in optimizers]
        handover.refuse_scaler_takers(optimizers)
        try:
            for optimizer, state in zip(optimizers, states, strict=True):
                self._prepare(optimizer, state)
                self._require_checked(state)
        finally:
            for state in states:
                self._iteration.of(state).stepping = None  # none was stepped
        self._decide_together(states)
        return [self._step(optimizer, (), {}, looked=True) for optimizer in given]

    def _decide_together(self, states: list[dict[str, Any]]) -> None:
        """Have all optimizers skip if one of them does."""
        flags = [
            flag for state in states for flag in state["found_inf_per_device"].values()
        ]
        together = self._any(flags)
        parts = [self._iteration.of(state).part for state in states]
        known = [part.verdict for part in parts if part is not None]
        overflowed = self._any([verdict.overflowed() for verdict in known])
        if len(known) == len(states):  # else a subclass has found something by itself
            for verdict in known:
                verdict.too_large.copy_(together * (1.0 - overflowed))
        for flag in flags:
            flag.copy_(together)
