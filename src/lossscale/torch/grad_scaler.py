# SPDX-License-Identifier: Apache-2.0
"""`GradScaler`: a drop-in `torch.amp.GradScaler` without non-finite updates.

It reads each gradient once per step. This file has the public methods, the private
names of torch's class that others override or call, and the order of calls; how
gradients are read is in `inspection`, how ranks decide together in `distributed`, and
the parts that the scaler is composed of in `scaler`.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch.amp.grad_scaler import OptState

from lossscale.core.explanation import Explanation
from lossscale.core.policies import Fixed, Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState
from lossscale.errors import LossScaleError, SettingError
from lossscale.torch.attributes import computed
from lossscale.torch.calls import warn_caller
from lossscale.torch.devices import disable_compile
from lossscale.torch.distributed.rank_groups import GroupsOrMeshes, parse_rank_groups
from lossscale.torch.inspection.buffer_pools import PinnedPool
from lossscale.torch.inspection.groups import FoundInf, invert
from lossscale.torch.inspection.request import InspectionRequest
from lossscale.torch.inspection.statistics import StatisticsSampler
from lossscale.torch.inspection.summary import GradientSummary
from lossscale.torch.parameters import has_grads
from lossscale.torch.scaler import (
    accumulation,
    attempts,
    clipping,
    closures,
    fused_optimizers,
    options,
    outcome,
)
from lossscale.torch.scaler.description import Describe, describe_run, find_describe
from lossscale.torch.scaler.gradient_checker import CallContext, GradientChecker
from lossscale.torch.scaler.history import OnStep, make_history
from lossscale.torch.scaler.iteration import FAILED, Iteration, OptimizerStep
from lossscale.torch.scaler.options import Names
from lossscale.torch.scaler.report import OptimizerOutcome, StepReport
from lossscale.torch.scaler.scale_update import (
    ScaleUpdate,
    torch_factors,
    torch_policy,
)
from lossscale.torch.scaler.schedulers import SteppedSchedulers
from lossscale.torch.scaler.state import ScalerState, StateDict, parse_state_dict
from lossscale.torch.scaler.wrapped_optimizers import (
    choose_stepped,
    unwrap,
)
from lossscale.torch.torch_internals import new_optimizer_state

Outputs = TypeVar("Outputs")
"""A tensor, or an iterable of tensors."""

_CHECK_HOOKS = ("_unscale_grads_", "unscale_", "_check_inf_per_device")
"""If a subclass overrides any of these, all checks must go through it."""

_UNSCALE = InspectionRequest(unscale_in_place=True)
_CHECK = InspectionRequest()


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that reads the gradients once and says what happened.

    With torch's arguments alone it takes torch's steps, to the bit, except where torch
    goes wrong; the page "PyTorch: differences from torch" lists where.

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
        >>> step = scaler.last_step
        >>> step.applied, round(step.norm, 3), scaler.skipped_steps
        (True, 2.0, 0)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float | Literal["auto"] = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        state: ScaleState | None = None,
        on_step: OnStep | None = None,
        names: Names | None = None,
        module: torch.nn.Module | None = None,
        on_no_gradients: Literal["raise", "ignore"] = "raise",
        allow_fp16: bool = False,
        measure_norm: bool = False,
        measure_amax: bool = False,
        max_consecutive_skips: int | None = 100,
        on_collapse: Literal["warn", "raise", "explain"] = "warn",
        process_groups: GroupsOrMeshes | None = None,
        meshes: GroupsOrMeshes | None = None,
        shard_groups: GroupsOrMeshes | Literal["world"] | None = None,
    ) -> None:
        """Make a scaler; its state goes to the device of the first scaled tensor.

        Args:
            device: The kind of device, as torch has it.
            init_scale: The initial scale, or "auto" for the policy `AutoStart`, which
                finds it on the first batch (see `attempts`).
            growth_factor: The factor of a growth, after enough finite steps.
            backoff_factor: The factor of a back-off, after a skipped step.
            growth_interval: How many consecutive finite steps make the scale grow.
            enabled: If not, every method does what it would without a scaler.
            policy: Any policy, in place of the four numbers above.
            state: A state to go on from, such as one that `from_portable` returned.
            on_step: Called with the `StepReport` of every step, in order, when its
                numbers have arrived: on a GPU a step late, without a wait.
            names: The names of parameters, as `module.named_parameters()` gives them.
            module: The module whose parameters have the names.
            on_no_gradients: "raise", as torch does when a step finds no gradient at
                all, or "ignore", which counts it as a finite step.
            allow_fp16: Unscale float16 gradients in place; torch refuses them.
            measure_norm: Measure the norm on every step, also where that takes another
                read of the gradients. (A GPU's kernels measure it anyway.)
            measure_amax: Measure the largest magnitude of the gradients on every step,
                also where that takes another read. (A GPU's kernels do it anyway.)
            max_consecutive_skips: After so many consecutive skipped steps there is a
                warning; `None` for none.
            on_collapse: "warn", once in a row of skipped steps, or "raise", every so
                many. "explain" warns, watches the batch that comes next, and warns
                again with what it saw; it needs `module`.
            process_groups: The ranks that skip together and have one scale: a process
                group, or several. DTensor parameters need none: they know their ranks.
            meshes: The same as a device mesh, or several; every dimension is a group.
            shard_groups: Those groups or meshes over which gradients that are not
                DTensors are shards, such as pipeline stages: their norms are added up.
                "world" for all ranks, which need not be running yet. Without it such
                gradients are taken to be whole on every rank.

        Raises:
            SettingError: If a setting is invalid, or if a policy comes together with
                one of the numbers that it replaces.
            StateError: If the policy cannot go on from the state.
        """
        options.check_device(device)
        first_scale = options.parse_init_scale(init_scale)
        numbers = (first_scale, growth_factor, backoff_factor, growth_interval)
        checked_policy = options.parse_policy(
            policy, numbers, is_auto=init_scale == "auto"
        )
        self._options = options.parse_options(
            policy=checked_policy,
            names=names,
            module=module,
            on_no_gradients=on_no_gradients,
            allow_fp16=allow_fp16,
            measure_norm=measure_norm,
            measure_amax=measure_amax,
            rank_groups=parse_rank_groups(process_groups, meshes, shard_groups),
        )
        self._history = make_history(
            on_step,
            max_consecutive_skips,
            on_collapse,
            options.make_watch(on_collapse, self, module),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().__init__(device, *numbers, enabled=enabled)
        for warning in caught:  # there is no CUDA: reported at the caller's line
            warn_caller(str(warning.message), warning.category)
        self._reports = 0
        """How many steps `update` has reported in this process."""
        self._make_caches()
        if not self._enabled:
            return
        self._per_optimizer_states = defaultdict(new_optimizer_state)
        self._is_on_host: bool | None = None
        """Whether the state is Python numbers; `None` before the first `scale`."""
        if checked_policy is not None:
            self._init_scale = float(checked_policy.init().scale)
            factors = torch_factors(checked_policy)
            self._growth_factor, self._backoff_factor, self._growth_interval = factors
        self._scale_update = self._make_scale_update()
        first = self._scale_update.first
        if state is not None:
            first = check_state(self._scale_update.policy, state)
            self._init_scale, self._init_growth_tracker = first.scale, first.good_steps
        self._state = ScalerState(first)

    def _make_caches(self) -> None:
        """Create what is never pickled."""
        self._current: Iteration | None = None
        self._describe = find_describe(self._history.on_step)
        """Describes the run to `on_step` at the first step; `None` after that."""
        self._sampler = StatisticsSampler(self._history.on_step)
        self._checker = GradientChecker(
            self._options, super()._unscale_grads_, self._sampler
        )
        self._schedulers = SteppedSchedulers()
        self._pool = PinnedPool()
        self._clip_arguments: tuple[object, ...] = ()
        self._clip_options = clipping.ClipOptions(())
        """What the last call of `clip_grad_norm_` was given, and what it means."""
        self._is_only_checking = False
        """Whether `_unscale_grads_` is called with gradients that stay scaled."""

    @property
    def _iteration(self) -> Iteration:
        """The current iteration: replacing torch's dict of states starts a new one."""
        current = self._current
        if current is None or current.states is not self._per_optimizer_states:
            current = self._current = Iteration(self._per_optimizer_states)
        return current

    def __repr__(self) -> str:
        """Return the scale, the policy and the counts; waits for the device."""
        name = type(self).__name__
        if not self._enabled:
            return f"{name}(enabled=False)"
        _, (total, skipped, _) = self._state.numbers()
        return (
            f"{name}(scale={self.get_scale():g}, policy={self._policy()!r}, "
            f"total_steps={total}, skipped_steps={skipped})"
        )

    # -- attributes --------------------------------------------------------------------

    @computed
    def policy(self) -> Policy:
        """The policy that moves the scale."""
        return self._policy() if self._enabled else Fixed(1.0)

    @computed
    def state(self) -> ScaleState:
        """The scale and its counters: tensors that the scaler goes on to change.

        Before the first `scale` they are Python numbers. Together with `policy` this is
        what `lossscale.to_portable` takes.
        """
        if not self._enabled:
            return ScaleState(1.0, 0, 0)
        if self._scale is None or self._growth_tracker is None:
            return self._state.initial(self._init_scale, self._init_growth_tracker)
        return self._state.current(self._scale, self._growth_tracker)

    @computed
    def last_step(self) -> StepReport | None:
        """The report of the last step; `None` before the first `update`."""
        return self._history.last

    @computed
    def last_explanation(self) -> Explanation | None:
        """What `on_collapse="explain"` saw of the batch after the last alarm."""
        return self._history.explanation

    @computed
    def total_steps(self) -> int:
        """How many steps there were, skipped ones included; waits for the device."""
        return self._state.numbers()[1][0] if self._enabled else 0

    @computed
    def skipped_steps(self) -> int:
        """How many steps were skipped; waits for the device."""
        return self._state.numbers()[1][1] if self._enabled else 0

    @computed
    def consecutive_skips(self) -> int:
        """How many steps were skipped since the last applied one; waits."""
        return self._state.numbers()[1][2] if self._enabled else 0

    def step_applied(self) -> torch.Tensor:
        """Return whether the last step was applied, as a boolean tensor.

        It stays on the device: `torch.where(scaler.step_applied(), new, old)` and
        `average.lerp_(weight, 0.01 * scaler.step_applied())` wait for nothing, while
        `if scaler.step_applied():` does. True before the first step.

        Example:
            >>> import lossscale.torch as ls
            >>> ls.GradScaler("cpu").step_applied()
            tensor(True)
        """
        last = self._history.last
        device = torch.device("cpu")
        if self._enabled and self._scale is not None:
            device = self._scale.device
        if last is None:
            return torch.ones((), dtype=torch.bool, device=device)
        return last.applied_on(device)

    def step_scheduler(
        self, scheduler: Any, *arguments: Any, wait: bool = False
    ) -> None:
        """Step a scheduler for every step that its optimizer took, and for no other.

        Call it after every `update`, in place of `scheduler.step()`; a schedule per
        epoch keeps `scheduler.step()`. On a GPU the host knows one step later whether a
        step was applied; there the rate may change one step late, and nothing waits.
        With `wait` it is never late.

        Args:
            scheduler: A scheduler of an optimizer that this scaler steps.
            *arguments: What `scheduler.step` takes, such as a metric.
            wait: Wait for the device.
        """
        if not self._enabled:
            scheduler.step(*arguments)
            return
        if not self._reports and self._is_overridden("update"):
            options.refuse_unknown_steps(self)
        self._history.deliver_ready(wait=wait)
        self._schedulers.step(scheduler, arguments, self._history, self._reports)

    def flush(self) -> None:
        """Wait for the device and deliver every report, to `on_step` first.

        Raises:
            CollapseError: As `update` does.
        """
        self._history.deliver_ready(wait=True)

    # -- scaling the loss --------------------------------------------------------------

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or an iterable of tensors, by the scale; as torch does."""
        if not self._enabled:
            return outputs
        losses: Any = outputs
        if type(losses) is torch.Tensor:
            # torch.compile refuses to trace torch's own method.
            scale = self._scale
            if scale is None:
                scale = self._init_scale_on(losses.device)
            if scale.device != losses.device:
                scale = scale.to(losses.device, non_blocking=True)
            scaled = losses * scale
        else:
            scaled = super().scale(losses)
        if not torch.compiler.is_compiling():
            iteration = self._iteration
            iteration.losses += 1
            if self._current_update().checks_loss:  # refuses invalid numbers
                iteration.check_loss(losses, self._tensors()[0].device)
            else:
                iteration.note_loss(losses)
        return cast("Outputs", scaled)

    def _init_scale_on(self, device: torch.device) -> torch.Tensor:
        """Make torch's two tensors, also where that is being compiled."""
        if not torch.compiler.is_compiling():
            self._lazy_init_scale_growth_tracker(device)
        else:
            self._scale = torch.full(
                (), self._init_scale, dtype=torch.float32, device=device
            )
            self._growth_tracker = torch.full(
                (), self._init_growth_tracker, dtype=torch.int32, device=device
            )
        return cast("torch.Tensor", self._scale)

    @disable_compile
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._place_state()

    def _place_state(self) -> None:
        """Decide where the state is kept, and make its tensors if they are needed."""
        scale, growth_tracker = self._tensors()
        update = self._scale_update
        self._is_on_host = self._state.is_on_host(scale, update)
        if not self._is_on_host:
            self._state.tensors(scale, growth_tracker, update)

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return torch's scale and growth tracker, which exist by now."""
        return cast("torch.Tensor", self._scale), cast(
            "torch.Tensor", self._growth_tracker
        )

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
        if isinstance(inputs, torch.nn.Module):
            options.refuse_module_as_inputs(inputs)
        self._history.has_penalties = True
        grads = torch.autograd.grad(
            super().scale(outputs),
            inputs,
            create_graph=create_graph,
            retain_graph=retain_graph,
            allow_unused=allow_unused,
        )
        if not self._enabled:
            return tuple(grads)
        inverse = invert(self._tensors()[0])
        return tuple(
            None if grad is None else grad * inverse.to(grad.device) for grad in grads
        )

    # -- explaining --------------------------------------------------------------------

    def explain(
        self,
        step_function: Callable[[], object],
        *,
        module: torch.nn.Module | None = None,
    ) -> Explanation:
        """Run one batch again, and say which layer first left its number format.

        Give it the function that runs forward and backward for one batch: one that
        calls `scaler.scale(loss).backward()`, once or for several micro-batches, or
        one that returns the loss before it is scaled. In it `step`, `update`,
        `unscale_`, `clip_grad_norm_` and `accumulate` of this scaler do nothing. The
        batch is run once with every operator watched, which takes seconds rather than
        milliseconds, and if a gradient overflowed up to four times at lower scales.

        Weights, buffers, gradients, the state of random generators, the optimizer and
        the scaler are what they were before, also if the function raises. With several
        ranks, call it on all of them.

        Args:
            step_function: What runs the batch. It must take the same batch each time.
            module: The model; not needed if the scaler was made with `module=`.

        Returns:
            What was seen. Print it, or read its fields.

        Raises:
            SettingError: If no model is known.
            ContextError: If the function runs no backward pass or steps an optimizer.

        Example:
            >>> import torch, lossscale.torch as ls
            >>> model = torch.nn.Linear(2, 1)
            >>> scaler = ls.GradScaler("cpu", init_scale=8.0, module=model)
            >>> batch = torch.tensor([[1.0, -1.0]])
            >>> seen = scaler.explain(lambda: model(batch).abs().sub(100).log().mean())
            >>> seen.loss_finite, seen.first.origin, seen.first.operation
            (False, 'log of a negative number', 'log')
        """
        from lossscale.torch.explain.explainer import explain  # noqa: PLC0415

        reference = self._options.model
        model = reference() if module is None and reference is not None else module
        if model is None and reference is not None:
            raise SettingError(options.MODEL_IS_GONE)
        scale = self.get_scale() if self._enabled else 1.0
        return explain(step_function, model, self, scale, self._options.rank_groups)

    # -- unscaling and clipping --------------------------------------------------------

    @disable_compile
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer, in place; waits for nothing.

        After `clip_grad_norm_` it writes the unscaled, clipped gradients back, if they
        are not there yet: a fused optimizer's stay scaled until then.
        """
        if not self._enabled:
            return
        if not hasattr(optimizer, "param_groups"):
            options.refuse_optimizer("unscale_", optimizer)
        if self._scale is None:
            self._check_scale_growth_tracker("unscale_")
        step = self._iteration.begin(optimizer)
        if step.clipped and step.stage is OptState.UNSCALED:
            step.write_back()
            return
        step.require_ready()
        self._unscale(step)

    def _unscale(self, step: OptimizerStep, *, stepping: bool = False) -> None:
        """Unscale gradients that are still scaled; `stepping` if `step` does so."""
        accumulator = step.accumulator
        if accumulator is not None:
            accumulator.require_complete()
        step.is_unscaling = True
        context = self._call_context()
        allow_fp16 = self._options.allow_fp16
        if accumulator is not None:
            found_inf = accumulation.finish(step, accumulator, self._checker, context)
        elif self._is_overridden("_unscale_grads_"):
            scale = context.tensor
            zero = torch.zeros((), dtype=torch.float32, device=scale.device)
            found_inf = self._unscale_grads_(
                step.optimizer, invert(scale), zero, allow_fp16
            )
            try:
                # The subclass may have checked by itself, without other ranks.
                found_inf = self._checker.share_flags(
                    step.optimizer, found_inf, context
                )
            except BaseException:
                step.mark_failed()
                raise
        else:
            found_inf, _ = self._checker.check(
                step.optimizer, step, _UNSCALE, context, allow_fp16=allow_fp16
            )
        step.mark_unscaled(found_inf, context.iteration.losses, stepping=stepping)

    @disable_compile
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | Sequence[float],
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        write_back: bool = False,
    ) -> torch.Tensor:
        """Clip the norm of an optimizer's gradients; in place of `unscale_`.

        One read gives the norm, the finite check and the factor. Nothing waits. What
        `.grad` holds afterwards depends on the optimizer: a plain one's gradients are
        unscaled and clipped. A fused one divides by itself, so its gradients stay
        scaled; pass `write_back=True`, or call `unscale_` afterwards, to have them
        unscaled and clipped as well.

        Args:
            optimizer: Whose gradients to clip; once a step, after all backward passes.
            max_norm: What their norm must not exceed, unscaled. Infinity measures the
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
        if not hasattr(optimizer, "param_groups"):
            options.refuse_optimizer("clip_grad_norm_", optimizer)
        arguments = (max_norm, norm_type, error_if_nonfinite, write_back)
        if arguments != self._clip_arguments or not isinstance(max_norm, float):
            self._clip_options = clipping.parse_clip_options(
                optimizer,
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
                write_back=write_back,
            )
            self._clip_arguments = arguments
        clip = self._clip_options
        if not self._enabled:
            return clipping.clip_unscaled(optimizer, clip)
        if self._scale is None:
            if self._has_nothing_to_clip(unwrap(optimizer)):
                return clipping.empty_norm(clip, "cpu")
            self._check_scale_growth_tracker("clip_grad_norm_")
        step = self._begin_step(optimizer)
        if step.clipped:
            step.refuse_clipped()
        context = self._call_context()
        are_scaled = step.state["stage"] is OptState.READY and step.accumulator is None
        if are_scaled and clip.fits_one_read and not self._is_overridden(*_CHECK_HOOKS):
            norm = clipping.clip_in_one_read(
                step, clip, self._checker, context, allow_fp16=self._options.allow_fp16
            )
            if norm is not None:
                return norm
        return self._clip_after_unscaling(step, clip, context)

    def _clip_after_unscaling(
        self, step: OptimizerStep, clip: clipping.ClipOptions, context: CallContext
    ) -> torch.Tensor:
        """Unscale gradients that are not unscaled yet, then clip them."""
        if step.stage is OptState.READY:
            if step.accumulator is None and self._has_nothing_to_clip(step.optimizer):
                return clipping.empty_norm(clip, context.tensor.device)
            self.unscale_(step.optimizer)
        return clipping.clip_after_unscaling(step, clip, self._checker, context)

    def _has_nothing_to_clip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether there is no gradient, here or on a rank that waits for this one.

        Then nothing counts as unscaled: the gradients may come later.
        """
        if has_grads(optimizer) or self._is_overridden(*_CHECK_HOOKS):
            return False
        return self._checker.inspector.plan_for(optimizer) is None

    # -- accumulating ------------------------------------------------------------------

    @disable_compile
    def accumulate(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a micro-batch's gradients up, in float32 or wider, if they are finite.

        Call it after every `backward`. The gradients are unscaled, added to buffers and
        taken off the parameters; of a micro-batch with a gradient that is not finite
        nothing is added. `step` applies the sum of the finite ones times all over
        finite ones, as if none were missing, and skips only if none was finite.
        `update` lowers the scale if any overflowed.

        Args:
            optimizer: Whose gradients to add up.
        """
        if not self._enabled:
            return  # the gradients add up in .grad
        if not hasattr(optimizer, "param_groups"):
            options.refuse_optimizer("accumulate", optimizer)
        self._check_scale_growth_tracker("accumulate")
        step = self._iteration.begin(optimizer)
        step.require_ready()
        collected = self._checker.inspector.collect(step.optimizer)
        if collected.groups is not None:
            accumulation.refuse_unsummable(collected.groups, collected.grads)
        context = self._call_context()
        self._checker.sample(step.optimizer, collected, context)
        accumulation.add_micro_batch(step, collected, context)

    # -- stepping ----------------------------------------------------------------------

    @disable_compile
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless a gradient is not finite.

        With `closure=` the optimizer may call for the loss several times: the closure
        scales it, runs `backward` and returns it. Its gradients are unscaled and
        checked after each call; if they are not finite, the parameters and the
        optimizer's state are what they were before the step.

        If `optimizer.step` raises, the next step with new gradients is taken as usual;
        with the same gradients it may be tried again.

        Args:
            optimizer: The optimizer to step.
            *args: What `optimizer.step` takes.
            **kwargs: The same, by name.

        Returns:
            What `optimizer.step` returned; `None` if the step was skipped.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if not hasattr(optimizer, "param_groups"):
            options.refuse_optimizer("step", optimizer)
        closure = None
        arguments = (args, kwargs)
        if args or kwargs:
            closure, arguments = closures.take_closure(optimizer, arguments)
        if closure is not None:
            step = self._begin_step(optimizer)
            check = partial(self._unscale_for_closure, step)
            with self._measure_update(step.optimizer):
                return closures.step_with_closure(
                    step, optimizer, closure, arguments, check
                )
        if self._scale is None:
            self._check_scale_growth_tracker("step")
        step = self._begin_step(optimizer)
        if step.failed:
            step.refuse_failed()
        return self._step(step, optimizer, arguments, is_prepared=False)

    @disable_compile
    def step_all(self, *optimizers: torch.optim.Optimizer) -> list[Any]:
        """Step several optimizers, or none of them if any gradient is not finite.

        Returns:
            What each `optimizer.step` returned; `None` for those that were skipped.
        """
        if not self._enabled:
            return [optimizer.step() for optimizer in optimizers]
        for optimizer in optimizers:
            if not hasattr(optimizer, "param_groups"):
                options.refuse_optimizer("step_all", optimizer)
        options.refuse_repeated(optimizers)
        self._check_scale_growth_tracker("step_all")
        steps = [self._begin_step(optimizer) for optimizer in optimizers]
        fused_optimizers.refuse_scaler_takers(step.optimizer for step in steps)
        try:
            for step in steps:
                if step.stage is OptState.READY:
                    self._prepare(step)
                step.require_checked()
        finally:
            for step in steps:
                step.stepping = None  # none was stepped
        outcome.skip_together(steps, self._tensors()[0].device)
        return [
            self._step(step, optimizer, ((), {}), is_prepared=True)
            for step, optimizer in zip(steps, optimizers, strict=True)
        ]

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """Return the step of an optimizer that has not taken it yet."""
        iteration = self._iteration
        step = iteration.begin(optimizer)
        stage = step.state["stage"]
        if stage is OptState.STEPPED:
            step.refuse_stepped()
        is_old = stage is not OptState.READY and step.losses != iteration.losses
        if is_old and step.has_stale_check():
            self._checker.check_again(step, self._call_context())
        return step

    def _step(
        self,
        step: OptimizerStep,
        outer_optimizer: torch.optim.Optimizer,
        arguments: fused_optimizers.StepArguments,
        *,
        is_prepared: bool,
    ) -> Any:
        """Step an optimizer whose closure, if any, was dealt with.

        Args:
            step: The optimizer's step.
            outer_optimizer: The optimizer, or the wrapper of a package around it.
            arguments: What its `step` takes.
            is_prepared: Whether its gradients were just checked.
        """
        optimizer = step.optimizer
        stepped = (
            outer_optimizer
            if outer_optimizer is optimizer
            else choose_stepped(optimizer, outer_optimizer)
        )
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_fused and fused_optimizers.takes_scaler(optimizer):
            if step.accumulator is not None:
                self.unscale_(optimizer)
            result = fused_optimizers.step_with_scaler(stepped, self, arguments)
            step.mark_stepped()
            return result
        if step.state["stage"] is OptState.READY and not is_prepared:
            self._prepare(step)
        if not is_fused and not step.state["found_inf_per_device"]:
            step.require_checked()
        if step.stepping is None:
            step.mark_stepping()
        args, kwargs = arguments
        try:
            if is_fused:
                is_exact = step.has_own_flags and not self._is_overridden(*_CHECK_HOOKS)
                with self._measure_update(optimizer):
                    result = fused_optimizers.step_fused(
                        step, stepped, arguments, self._tensors()[0], is_exact=is_exact
                    )
            else:
                result = self._maybe_opt_step(stepped, step.state, *args, **kwargs)
        except Exception:
            step.raised = True
            raise
        step.mark_stepped()
        return result

    def _prepare(self, step: OptimizerStep) -> None:
        """Check scaled gradients; unscale them if the optimizer cannot."""
        is_fused = getattr(step.optimizer, "_step_supports_amp_scaling", False)
        if is_fused and step.accumulator is None:
            if self._is_overridden("_check_inf_per_device", "_unscale_grads_"):
                self._check_inf_per_device(step.optimizer)
            else:
                self._check(step)
        elif self._is_overridden("unscale_"):
            self.unscale_(step.optimizer)
        else:
            self._unscale(step, stepping=True)

    def _measure_update(
        self, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[None]:
        """Return a context in which a step is measured, if the callback wants it."""
        if not self._sampler.is_listening:
            return _NO_CONTEXT
        return self._checker.measure_update(optimizer, self._iteration)

    def _unscale_for_closure(self, step: OptimizerStep) -> bool:
        """Unscale the gradients of a closure; return whether they are finite."""
        self._check_scale_growth_tracker("step")
        if step.stage is not OptState.READY:
            # The closure has clipped them, and the optimizer does not divide.
            step.write_back()
        elif self._is_overridden("unscale_"):
            self.unscale_(step.optimizer)
        else:
            self._unscale(step)
        step.require_checked()
        return not any(flag.item() for flag in step.found_inf.values())

    # -- the end of the iteration ------------------------------------------------------

    @disable_compile
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale; call it once, after all optimizers of an iteration.

        Args:
            new_scale: A scale to set instead of what the policy says: a float, or a
                tensor of one number.

        Raises:
            CollapseError: If too many consecutive steps were skipped, and the scaler
                was made with `on_collapse="raise"`. The update itself is complete.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._scale, self._growth_tracker
        if scale is None or growth_tracker is None:
            scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            new_scale = options.check_new_scale(new_scale, self._device)
        iteration = self._iteration
        flagged = [
            state
            for state in iteration.states.values()
            if state["found_inf_per_device"]
        ]
        has_failed = iteration.has_failed
        is_missing = not flagged and not self._options.ignores_no_gradients
        if new_scale is None and (is_missing or has_failed):
            message = "No inf checks were recorded prior to update."
            raise AssertionError(f"{message} {FAILED}" if has_failed else message)
        outcomes = None
        if flagged or new_scale is None:
            outcomes = outcome.collect_outcomes(
                iteration, flagged, scale, partial(self._is_overridden, "step")
            )
        # First: a step that is interrupted from here on is over, and is not counted
        # twice if update() is called again.
        self._per_optimizer_states = defaultdict(new_optimizer_state)
        self._current = None
        if outcomes is not None:
            update = _KEEP_SCALE if new_scale is not None else self._current_update()
            report, applied = self._advance(
                iteration, outcomes, update, scale, growth_tracker
            )
        if isinstance(new_scale, float):
            scale.fill_(new_scale)
        elif new_scale is not None:
            scale.copy_(new_scale.reshape(()))
        if outcomes is not None:
            self._history.add(report, applied=applied)

    def _describe_run(
        self,
        describe: Describe,
        device: torch.device,
        outcomes: list[OptimizerOutcome],
    ) -> None:
        self._describe = None
        names = self._options.names
        describe_run(describe, self._policy(), device, names, outcomes)

    def attach(self, recorder: object, module: torch.nn.Module | None = None) -> None:
        """Describe the run to a recorder, and measure the tensors that it wants.

        A scaler does so by itself for its `on_step`. Trainers' callbacks, which are
        handed a scaler and read its `last_step`, call it before the training.

        Args:
            recorder: A `lossscale.diagnostics.Recorder`, or what has its methods
                `describe` and `wants_statistics`.
            module: The module whose parameters are trained. It names them, if the
                scaler was made without names.
        """
        names = self._options.names
        if module is not None and not names.list_trained():
            names.add(module.named_parameters())
        self._describe = find_describe(recorder)
        if not self._sampler.is_listening:
            self._sampler.listen(recorder, self._reports + 1)

    def _advance(
        self,
        iteration: Iteration,
        outcomes: list[OptimizerOutcome],
        update: ScaleUpdate,
        scale: torch.Tensor,
        growth_tracker: torch.Tensor,
    ) -> tuple[StepReport, bool | None]:
        """Advance the state by what was found.

        Returns:
            The report of the step, and whether every optimizer took it; `None` if the
            host does not know yet.
        """
        if self._is_on_host is None:
            self._place_state()
        self._reports += 1
        device_loss: GradientSummary | None = None
        loss_nonfinite = iteration.host_loss_nonfinite
        if self._is_on_host:
            host_outcome = outcome.host_outcome(iteration, outcomes, scale.device)
            self._state.advance_on_host(scale, growth_tracker, update, host_outcome)
            if host_outcome.loss_nonfinite is not None:
                loss_nonfinite = host_outcome.loss_nonfinite
            applied: bool | None = host_outcome.applied
        else:
            flags = outcome.device_outcome(iteration, outcomes, scale.device)
            tensors = self._state.tensors(scale, growth_tracker, self._scale_update)
            if flags.summary is not None and update.can_copy(tensors):
                copy = outcomes[0].summary.take_copy(self._pool)
                flags = flags._replace(copy=copy)
            update.advance_tensors(
                tensors,
                flags,
                partial(outcome.find_measurements, outcomes, update, scale.device),
            )
            for one in outcomes:
                one.summary.publish(self._pool)
            if flags.loss_nonfinite is not None:
                device_loss = GradientSummary.of_flag(flags.loss_nonfinite, scale)
                device_loss.publish(self._pool)
            applied = None
        report = StepReport(
            self._reports,
            outcomes,
            self._options.names,
            loss_nonfinite,
            device_loss,
            self._sampler.take(iteration) if self._sampler.is_listening else None,
        )
        if applied is None and all(one.summary.is_on_host for one in outcomes):
            applied = report.applied
        if self._describe is not None:
            self._describe_run(self._describe, scale.device, outcomes)
        return report, applied

    def discard(self) -> None:
        """Drop the current iteration: start again with a new backward pass.

        Call it together with `zero_grad` where an iteration is abandoned: after
        an exception in a step, or to forget what `accumulate` has added up. Gradients
        that are still there count as scaled. The scale does not move, and nothing is
        reported. With several ranks, call it on all of them.

        Example:
            >>> import torch, lossscale.torch as ls
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = torch.optim.SGD([weight], lr=1.0)
            >>> scaler = ls.GradScaler("cpu")
            >>> scaler.scale(weight.sum()).backward()
            >>> scaler.accumulate(optimizer)
            >>> scaler.discard()  # a bad batch: begin again
            >>> scaler.scale(2 * weight.sum()).backward()
            >>> scaler.step(optimizer)
            >>> scaler.update()
            >>> weight.item()
            -1.0
        """
        if self._enabled:
            self._per_optimizer_states = defaultdict(new_optimizer_state)

    def attempts(self) -> Iterator[int]:
        """Repeat the first batches of `AutoStart` at a lower scale: no batch is lost.

        Put the whole step of a batch into the loop. Until the policy has found its
        first scale, a step that overflowed is taken again; each attempt waits for the
        device once. From then on there is one attempt, without a wait. Every attempt
        counts as a step in `total_steps`, and one that overflowed in `skipped_steps`;
        layers that count batches, such as batch norm, see the batch again.

        Raises:
            SettingError: If the policy does not search its first scale.

        Example:
            >>> import lossscale, torch, lossscale.torch as ls
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = torch.optim.SGD([weight], lr=2.0**-9)
            >>> scaler = ls.GradScaler("cpu", policy=lossscale.AutoStart())
            >>> for batch in (256.0, 128.0):
            ...     for attempt in scaler.attempts():
            ...         optimizer.zero_grad()
            ...         loss = (weight.half() * batch).float().sum()
            ...         scaler.scale(loss).backward()
            ...         scaler.step(optimizer)
            ...         scaler.update()
            >>> weight.item(), scaler.get_scale(), scaler.skipped_steps
            (0.25, 16.0, 3)
        """
        if not self._enabled:
            yield 1
            return
        policy = attempts.find_starting(self.policy)
        if self._state.has_started:
            yield 1
            return

        def look() -> attempts.Progress:
            return attempts.Progress(
                self._reports, lambda: (self.state, self.consecutive_skips)
            )

        def note_start() -> None:
            self._state.has_started = True

        yield from attempts.repeat(policy, look, note_start)

    # -- checking gradients, under torch's private names -------------------------------

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> FoundInf:
        optimizer = unwrap(optimizer)
        state = self._per_optimizer_states.get(id(optimizer))
        step = None if state is None else self._iteration.steps.get(id(state))
        flags, _ = self._checker.check(
            optimizer,
            step,
            _UNSCALE._replace(check_headroom=not self._is_only_checking),
            self._call_context(),
            allow_fp16=allow_fp16 or self._options.allow_fp16,
            inverse=inv_scale.reshape(()).to(torch.float32),
        )
        # torch returns copies of `found_inf`, of its shape and with what it holds.
        return {
            device: torch.maximum(found_inf.to(device), flag)
            for device, flag in flags.items()
        }

    # torch declares str for the keys, which are devices.
    def _check_inf_per_device(  # type: ignore[override]
        self, optimizer: torch.optim.Optimizer
    ) -> FoundInf:
        self._check_scale_growth_tracker("_check_inf_per_device")
        step = self._iteration.begin(optimizer)
        if not self._is_overridden("_unscale_grads_"):
            return self._check(step)
        # The hook is called with an inverse of 1, as torch does, and cannot know what
        # dividing by the scale will make of the gradients.
        self._is_only_checking = True
        try:
            flags = super()._check_inf_per_device(step.optimizer)
        finally:
            self._is_only_checking = False
        found_inf = self._check(step)
        for device, flag in cast("FoundInf", flags).items():
            # A device may have gradients that only the subclass knows of.
            device_flag = found_inf.setdefault(device, flag.reshape(()))
            torch.maximum(device_flag, flag.reshape(()), out=device_flag)
        # Also if the hook returned no flag: the other ranks wait.
        found_inf = self._checker.share_flags(
            step.optimizer, found_inf, self._call_context()
        )
        step.mark_checked(found_inf)
        return found_inf

    def _check(self, step: OptimizerStep) -> FoundInf:
        """Check gradients that stay scaled; record and return the flags."""
        found_inf, _ = self._checker.check(
            step.optimizer, step, _CHECK, self._call_context(), allow_fp16=True
        )
        step.mark_checked(found_inf)
        return found_inf

    def _is_overridden(self, *names: str) -> bool:
        """Whether a subclass, or an assignment to this object, replaces a method."""
        replaced, cls = self.__dict__, type(self)
        for name in names:
            method = getattr(cls, name)
            if name in replaced:
                return True
            if method is not _OWN[name] and not method.__module__.startswith(_PACKAGE):
                return True
        return False

    def _call_context(self) -> CallContext:
        """Return the tensors and the iteration, for a collaborator to work on."""
        update = self._scale_update if self._enabled else _KEEP_SCALE
        return CallContext(self._scale, self._growth_tracker, self._iteration, update)

    def _check_scale_growth_tracker(
        self, funcname: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None and self._options.rank_groups.resolve().deciding:
            # A pipeline stage without a loss has scaled nothing, and takes part.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    # -- settings and saving -----------------------------------------------------------

    def _policy(self) -> Policy:
        """Return the policy, also where a subclass has an attribute of that name."""
        return self._current_update().policy

    def _factors(self) -> tuple[float, float, int]:
        return self._growth_factor, self._backoff_factor, self._growth_interval

    def _make_scale_update(self) -> ScaleUpdate:
        """Return the policy that the settings describe, ready to run."""
        factors = self._factors()
        policy = self._options.policy
        if policy is not None:
            update = ScaleUpdate(policy, in_float64=False)
        else:
            described = torch_policy(self._init_scale, *factors)
            update = ScaleUpdate(described, in_float64=True)
        self._updated_factors = factors
        return update

    def _current_update(self) -> ScaleUpdate:
        """Return the update; made again if a factor was assigned by hand."""
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        if self._options.policy is None and factors != self._updated_factors:
            self._use(self._make_scale_update())
        return self._scale_update

    def _use(self, update: ScaleUpdate) -> None:
        """Go on with another policy; the tensor that a kernel reads stays the same."""
        self._scale_update = update
        self._state.write_settings(update)

    def _set_factor(self, name: str, value: float) -> None:
        """Set one of torch's numbers, unless it is invalid."""
        policy = self._options.policy
        if policy is not None:
            options.refuse_factor(name, policy)
        before = getattr(self, f"_{name}")
        setattr(self, f"_{name}", value)
        try:
            self._use(self._make_scale_update())
        except LossScaleError:
            setattr(self, f"_{name}", before)
            raise

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor; it must be above 1."""
        self._set_factor("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the back-off factor; it must be between 0 and 1."""
        self._set_factor("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval. At or below the steps counted, growth comes next."""
        self._set_factor("growth_interval", new_interval)

    def state_dict(self) -> StateDict:
        """Return torch's five entries and four of ours; torch reads it and skips them.

        Entries: `scale`, `growth_factor`, `backoff_factor`, `growth_interval`,
        `_growth_tracker`; `bad_steps` (overflows counted towards a back-off),
        `total_steps`, `skipped_steps`, `consecutive_skips`; with a policy that
        remembers more, such as `Headroom`, that as well under `memory`. Empty if the
        scaler is disabled.
        """
        state_dict = super().state_dict()
        if self._enabled:
            state_dict |= self._state.state_dict()
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict` of this class or of torch's returned.

        A scaler that was made with `policy=` keeps its policy and loads the numbers of
        the state alone; otherwise torch's three settings are loaded as well.

        Raises:
            StateError: If a number is invalid, such as a scale of 0; nothing changes.
        """
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)  # which says what torch says
            return
        entries, state, counters = parse_state_dict(
            state_dict, self._options.policy, self._factors()
        )
        super().load_state_dict(entries)
        self._state.set_numbers(state, counters)
        self._use(self._make_scale_update())
        if self._iteration.has_failed:
            self.discard()

    def __getstate__(self) -> StateDict:
        """Return what is pickled: numbers and settings; no names and no callback.

        Raises:
            ContextError: If the scaler has process groups, which belong to a process.
        """
        self._options.rank_groups.require_none_to_pickle()
        state: StateDict = super().__getstate__()
        if self._enabled:
            policy = self._scale_update.policy
            in_float64 = self._options.policy is None
            state["_scale_update"] = ScaleUpdate(policy, in_float64=in_float64)
            state["_is_on_host"] = None
            state["_state"] = copy(self._state)  # copy.copy shares what is in here
        state["_history"] = self._history.make_empty()
        state["_options"] = self._options.to_pickle()
        for name in ("_current", "_checker", "_sampler", "_schedulers", "_pool"):
            del state[name]
        del state["_describe"]
        state.pop("scale", None)  # while a batch is watched after the alarm
        return state

    def __setstate__(self, state: StateDict) -> None:
        """Restore what was pickled."""
        super().__setstate__(state)
        self._make_caches()


_PACKAGE = f"{__package__}."

_OWN = dict(vars(GradScaler))
"""The methods as they are here, which most scalers have."""

_NO_CONTEXT = nullcontext()

_KEEP_SCALE = ScaleUpdate(Fixed(), in_float64=False)
"""Counts a step, and leaves the scale to the caller."""
