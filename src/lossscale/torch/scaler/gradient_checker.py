# SPDX-License-Identifier: Apache-2.0
"""`GradientChecker`: inspects the gradients of an optimizer and records the result.

It refuses gradients that must not be unscaled before anything is changed, leaves tensor
subclasses to torch's own operation, shares flags with other ranks, and lets a loss that
was not finite skip the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch

from lossscale.torch.distributed.consensus import Number
from lossscale.torch.inspection.groups import (
    FoundInf,
    GradientGroups,
    GradientScale,
    any_flag,
    invert,
    make_flag,
)
from lossscale.torch.inspection.inspector import (
    Collected,
    GradientInspector,
    Inspection,
)
from lossscale.torch.inspection.ranked import RankContext, reduce_flags
from lossscale.torch.inspection.request import InspectionRequest
from lossscale.torch.inspection.statistics import StatisticsSampler
from lossscale.torch.inspection.summary import GradientSummary
from lossscale.torch.optim.optimizer import ScaledOptimizer
from lossscale.torch.scaler.iteration import Iteration, OptimizerStep
from lossscale.torch.scaler.options import ScalerOptions
from lossscale.torch.scaler.scale_update import ScaleUpdate

UnscaleByTorch: TypeAlias = Callable[..., dict[torch.device, torch.Tensor]]
"""`torch.amp.GradScaler._unscale_grads_` of the scaler."""


class CallContext(NamedTuple):
    """What changes from call to call: the scaler's tensors and its iteration."""

    scale: torch.Tensor | None
    growth_tracker: torch.Tensor | None
    iteration: Iteration
    update: ScaleUpdate

    @property
    def tensor(self) -> torch.Tensor:
        """The scale, which exists by now."""
        if self.scale is None:
            message = "the scale is not on a device yet"
            raise AssertionError(message)
        return self.scale

    def for_ranks(self) -> RankContext:
        """Return what ranks must share besides their gradients."""
        return RankContext(
            self.scale,
            self.growth_tracker,
            self.iteration.loss_nonfinite,
            wants_amax=not self.update.is_builtin,
        )


class GradientChecker:
    """Checks the gradients of optimizers for one scaler."""

    def __init__(
        self,
        options: ScalerOptions,
        unscale_by_torch: UnscaleByTorch,
        sampler: StatisticsSampler,
    ) -> None:
        self._options = options
        self._unscale_by_torch = unscale_by_torch
        self._sampler = sampler
        self._measures_more = options.measure_norm or options.measure_amax
        self.inspector = GradientInspector(options.rank_groups)
        self._gradient_scale = GradientScale(None)
        """The scaler's own scale."""

    def check(
        self,
        optimizer: torch.optim.Optimizer,
        step: OptimizerStep | None,
        request: InspectionRequest,
        context: CallContext,
        *,
        allow_fp16: bool,
        inverse: torch.Tensor | None = None,
        collected: Collected | None = None,
    ) -> tuple[FoundInf, Inspection | None]:
        """Inspect the gradients of an optimizer.

        Args:
            optimizer: The optimizer.
            step: Its step, if it has begun one: the summary is recorded there.
            request: What to measure.
            context: The scaler's tensors and iteration.
            allow_fp16: Whether float16 gradients may be unscaled; our own optimizers'
                always may.
            inverse: What unscales them, if not the scaler's scale.
            collected: Its gradients, if they were collected already.

        Returns:
            The flag of each device; and the inspection, unless torch's own operation
            had to check the gradients, or there are none.
        """
        if collected is None:
            collected = self.inspector.collect(optimizer)
        _, groups, plan = collected
        if groups is None and plan is None:
            return self._flags_without_gradients(step, context), None
        if groups is not None and groups.may_be_refused:
            self._refuse(optimizer, step, groups, allow_fp16=allow_fp16)
        if self._sampler.is_listening and (inverse is None or request.unscale_in_place):
            self.sample(optimizer, collected, context)
        if self._measures_more or not context.update.is_builtin:
            request = self._complete(request, context.update)
        try:
            if groups is not None and groups.is_foreign:
                flags = self._check_by_torch(optimizer, request, context, inverse)
                return self.share_flags(optimizer, flags, context), None
            inspection, loss = self.inspector.inspect(
                optimizer,
                collected,
                self._gradient_scale_from(context.scale, inverse),
                request,
                context.for_ranks,
            )
            _apply_loss(loss, inspection.found_inf, context)
        except BaseException:
            if request.unscale_in_place and step is not None:
                step.mark_failed()
            raise
        if step is not None:
            step.record(inspection.summary)
        return inspection.found_inf, inspection

    def check_again(self, step: OptimizerStep, context: CallContext) -> None:
        """Check unscaled gradients that were written to after a new loss was scaled."""
        found_before, summary = step.found_inf, step.summary
        clipping = step.grad_scale, step.inspection, step.clipped
        one = torch.ones((), dtype=torch.float32, device=context.tensor.device)
        found_inf, _ = self.check(
            step.optimizer,
            step,
            InspectionRequest(),
            context,
            allow_fp16=True,
            inverse=one,
        )
        # What `clip_grad_norm_` has decided still holds, and so does the report of it.
        step.grad_scale, step.inspection, step.clipped = clipping
        second = step.summary
        if summary is not None and second is not None:
            if second.is_on_host and second.skips_step():
                # It names what has overflowed since, of gradients that are unscaled.
                second.replace_scale(summary)
            else:
                step.summary = summary
        for device, flag in found_before.items():
            if device in found_inf:
                new_flag = found_inf[device].reshape(flag.shape)
                torch.maximum(flag, new_flag, out=flag)

    def _gradient_scale_from(
        self, scale: torch.Tensor | None, inverse: torch.Tensor | None
    ) -> GradientScale:
        """Return the scale of gradients: the scaler's, unless one is given."""
        if inverse is not None:
            return GradientScale(None, inverse)
        if self._gradient_scale.scale is not scale:
            self._gradient_scale = GradientScale(scale)
        return self._gradient_scale

    def sample(
        self,
        optimizer: torch.optim.Optimizer,
        collected: Collected,
        context: CallContext,
    ) -> None:
        """Take the statistics of scaled gradients, if they are wanted."""
        if self._sampler.is_due():
            name_of = self._options.names.name_of
            self._sampler.sample(context.iteration, optimizer, collected, name_of)

    @contextmanager
    def measure_update(
        self, optimizer: torch.optim.Optimizer, iteration: Iteration
    ) -> Iterator[None]:
        """Have one of our optimizers measure the step within, if it is wanted.

        Args:
            optimizer: The optimizer; no other than ours can measure.
            iteration: The iteration that the step belongs to.
        """
        if not isinstance(optimizer, ScaledOptimizer) or not self._sampler.is_due():
            yield
            return
        optimizer.measure_next_update()
        try:
            yield
        except BaseException:
            optimizer.take_measurement()
            raise
        measurement = optimizer.take_measurement()
        if measurement is not None:
            name_of = self._options.names.name_of
            names = {at: name_of(optimizer, at) for at in measurement.positions}
            self._sampler.add_update(iteration, measurement, names.__getitem__)

    def share_flags(
        self,
        optimizer: torch.optim.Optimizer,
        found_inf: FoundInf,
        context: CallContext,
    ) -> FoundInf:
        """Return flags that all ranks share, from flags that were found without us."""
        plan = self.inspector.plan_for(optimizer)
        if plan is None:
            return found_inf
        local_flag = any_flag(list(found_inf.values()), context.tensor.device)
        (skips, *_), loss = reduce_flags(plan, local_flag, None, context.for_ranks())
        keep_loss_of_ranks(loss, context)
        for flag in found_inf.values():
            flag.copy_(skips.expand_as(flag))
        return found_inf or {skips.device: skips}

    def _complete(
        self, request: InspectionRequest, update: ScaleUpdate
    ) -> InspectionRequest:
        """Add what the options and the policy want measured."""
        options, reads = self._options, not update.is_builtin
        if options.measure_norm or reads:
            request = request._replace(measure_norm=True)
        if options.measure_amax or reads:
            request = request._replace(measure_amax=True)
        return request

    def _flags_without_gradients(
        self, step: OptimizerStep | None, context: CallContext
    ) -> FoundInf:
        """Return the flags of a step without any gradient."""
        if not self._options.ignores_no_gradients or context.scale is None:
            return {}
        flag = make_flag(0.0, context.scale.device)
        if step is not None:
            step.record(GradientSummary.of_flag(flag, context.scale))
        return {flag.device: flag}

    def _check_by_torch(
        self,
        optimizer: torch.optim.Optimizer,
        request: InspectionRequest,
        context: CallContext,
        inverse: torch.Tensor | None,
    ) -> FoundInf:
        """Leave tensor subclasses to torch's own operation."""
        device = (context.tensor if inverse is None else inverse).device
        zero = torch.zeros((), dtype=torch.float32, device=device)
        if not request.unscale_in_place:
            inverse = torch.ones_like(zero)
        elif inverse is None:
            inverse = invert(context.tensor)
        flags = self._unscale_by_torch(optimizer, inverse, zero, True)
        if context.iteration.loss_nonfinite is not None:
            raise_flags(flags, context.iteration.loss_nonfinite)
        return flags

    def _refuse(
        self,
        optimizer: torch.optim.Optimizer,
        step: OptimizerStep | None,
        groups: GradientGroups,
        *,
        allow_fp16: bool,
    ) -> None:
        """Raise for gradients that must not be unscaled; nothing has been changed."""
        allow_fp16 = allow_fp16 or isinstance(optimizer, ScaledOptimizer)
        is_half = bool(groups.half_indices) and not allow_fp16
        if step is not None and (is_half or groups.is_overlapping):
            step.is_unscaling = False
        if is_half:
            self._refuse_half(optimizer, groups.half_indices)
        if groups.is_overlapping:
            message = (
                "unsupported operation: more than one element of the written-to tensor "
                "refers to a single memory location. Please clone() the tensor before "
                "performing the operation. (It is a gradient that was expanded.)"
            )
            raise RuntimeError(message)

    def _refuse_half(
        self, optimizer: torch.optim.Optimizer, half_indices: list[int]
    ) -> None:
        """Raise, with the names of the float16 gradients and what to do about them."""
        params = [
            param for group in optimizer.param_groups for param in group["params"]
        ]
        with_grad = [i for i, param in enumerate(params) if param.grad is not None]
        names = [
            self._options.names.name_of(optimizer, with_grad[index])
            for index in half_indices[:6]
        ]
        more = len(half_indices) - len(names)
        message = (
            "Attempting to unscale FP16 gradients. The gradients of "
            f"{', '.join(names)}{f' and {more} more' if more else ''} are float16. "
            "Either keep the parameters in float32 and run the forward pass under "
            "torch.autocast, or step them by lossscale.torch.optim with "
            "master_weights=True, or, to unscale them in float16 all the same, write "
            "GradScaler(..., allow_fp16=True)."
        )
        raise ValueError(message)


def _apply_loss(loss: Number | None, found_inf: FoundInf, context: CallContext) -> None:
    """Let a loss that was not finite skip the step; keep what other ranks found."""
    if loss is not None:
        keep_loss_of_ranks(loss, context)
    elif context.iteration.loss_nonfinite is not None:
        raise_flags(found_inf, context.iteration.loss_nonfinite)


def keep_loss_of_ranks(loss: Number, context: CallContext) -> None:
    """Keep whether a loss of any rank was not finite, if the policy asks."""
    if context.update.checks_loss:
        context.iteration.loss_nonfinite = torch.as_tensor(
            loss, dtype=torch.float32, device=context.tensor.device
        )


def raise_flags(found_inf: FoundInf, common_flag: torch.Tensor) -> None:
    """Set every flag that another one implies."""
    for flag in found_inf.values():
        torch.maximum(flag, common_flag.to(flag.device), out=flag)
