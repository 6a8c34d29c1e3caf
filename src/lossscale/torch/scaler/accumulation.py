# SPDX-License-Identifier: Apache-2.0
"""`GradientAccumulator`: sums of micro-batches that leave an overflowed one out.

torch adds scaled gradients up in `.grad`: one infinity among sixteen micro-batches
ruins all of them. Here every micro-batch is checked and then added to buffers of its
own, or not; which of the two is decided on the device.
"""

import torch

from lossscale.errors import ContextError, GradientError
from lossscale.torch.distributed.dtensor import from_local_shard, local_shard
from lossscale.torch.inspection.groups import (
    FoundInf,
    GradientGroups,
    GradientScale,
    any_flag,
    invert,
)
from lossscale.torch.inspection.inspector import Collected
from lossscale.torch.inspection.ranked import reduce_flags
from lossscale.torch.inspection.request import LIMITS, InspectionRequest
from lossscale.torch.inspection.summary import (
    AMAX,
    FOUND_INF,
    HEADER,
    NAN,
    SCALE,
    TOO_LARGE,
)
from lossscale.torch.optim.optimizer import ScaledOptimizer
from lossscale.torch.parameters import params_of
from lossscale.torch.scaler.gradient_checker import (
    CallContext,
    GradientChecker,
    keep_loss_of_ranks,
    raise_flags,
)
from lossscale.torch.scaler.iteration import MicroBatch, OptimizerStep


class GradientAccumulator:
    """What the micro-batches of one optimizer add up to in one iteration."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._batches = 0
        # Not torch's default dtype: bfloat16 counts to 256.
        zero = torch.zeros((), dtype=torch.float32, device=device)
        self._finite_batches = zero.clone()
        self._overflowed = zero.clone()
        """1.0 if a micro-batch overflowed."""
        self._amaxes = zero.new_zeros(len(params_of(optimizer)))
        """The largest magnitude of each parameter's gradients; NaN exceeds any."""
        self._of_ranks: list[torch.Tensor] = []
        """Whether any rank had a NaN, and the largest magnitude over all ranks."""
        self._sums: dict[int, torch.Tensor] = {}
        """By the id of the parameter; of a DTensor, sums of the shard of this rank."""

    @torch.no_grad()
    def add(
        self,
        *,
        skips: torch.Tensor,
        overflowed: torch.Tensor,
        amaxes: torch.Tensor | None,
        inverse: torch.Tensor,
        of_ranks: list[torch.Tensor],
    ) -> None:
        """Add the gradients of one micro-batch and take them off the parameters.

        Args:
            skips: 1.0 if the micro-batch must be left out, else 0.0.
            overflowed: 1.0 if one of its gradients is not finite.
            amaxes: The largest magnitude of each; `None` if this rank has no gradient.
            inverse: What unscales them.
            of_ranks: Whether any rank has a NaN, and the largest magnitude; may be
                empty.
        """
        self._batches += 1
        is_finite = skips == 0
        self._finite_batches += is_finite
        self._overflowed = torch.maximum(self._overflowed, overflowed)
        if of_ranks:
            old_flags = self._of_ranks or of_ranks
            self._of_ranks = list(map(torch.maximum, old_flags, of_ranks))
        if amaxes is None:
            return
        params = params_of(self._optimizer)
        self._note_amaxes(params, amaxes)
        for param in params:
            if param.grad is None:
                continue
            grad = local_shard(param.grad)
            unscaled = _upcast(grad) * inverse.to(grad.device)
            # A product with 0 would leave NaN; a choice does not.
            summand = torch.where(is_finite.to(grad.device), unscaled, 0.0)
            total = self._sums.get(id(param))
            if total is None:
                self._sums[id(param)] = summand
            else:
                total.add_(summand)
            param.grad = None

    def _note_amaxes(self, params: list[torch.Tensor], amaxes: torch.Tensor) -> None:
        """Keep the largest magnitude of each parameter's gradients."""
        missing = len(params) - len(self._amaxes)
        if missing > 0:  # parameters that were added meanwhile
            self._amaxes = torch.cat([self._amaxes, self._amaxes.new_zeros(missing)])
        amaxes = amaxes.to(self._amaxes.device)
        indices = [i for i, param in enumerate(params) if param.grad is not None]
        # An index of the host's, which a device waits for, is needed only where a
        # gradient is missing.
        if len(indices) == len(params):
            self._amaxes = torch.maximum(self._amaxes, amaxes)
        else:
            self._amaxes[indices] = torch.maximum(self._amaxes[indices], amaxes)

    def require_complete(self) -> None:
        """Raise if there are gradients that were not added up."""
        if any(param.grad is not None for param in params_of(self._optimizer)):
            message = (
                "Some gradients were not passed to accumulate(). Call "
                "accumulate(optimizer) after every backward()."
            )
            raise ContextError(message)

    @torch.no_grad()
    def restore_grads(self) -> None:
        """Put the sums into `.grad`, as if no micro-batch had been left out."""
        finite = self._finite_batches
        factor = torch.where(finite > 0, self._batches / finite, 0.0)
        for param in params_of(self._optimizer):
            total = self._sums.pop(id(param), None)
            if total is None:
                continue
            total.mul_(factor.to(total.device))
            dtype = total.dtype
            if not isinstance(self._optimizer, ScaledOptimizer):
                # A parameter may want gradients of another dtype.
                dtype = param.grad_dtype or param.dtype
            elif param.grad_dtype not in (dtype, None):
                # Ours take a float32 sum for a half-precision weight. In float16 the
                # smallest gradients would be zero again, and a sum may be infinite.
                param.grad_dtype = None
            param.grad = from_local_shard(total.to(dtype), param)

    def merge_into(
        self,
        buffer: torch.Tensor,
        param_indices: list[int] | None,
        scale: torch.Tensor,
    ) -> None:
        """Merge the measurements of the micro-batches into the summary of their sum.

        Args:
            buffer: The buffer of the summary.
            param_indices: Which parameters its tensors belong to; `None` for all.
            scale: The scale of the micro-batches.
        """
        none_finite = self.none_finite.to(buffer.device)
        overflowed = self._overflowed.to(buffer.device)
        buffer[SCALE] = scale
        buffer[FOUND_INF] = torch.maximum(buffer[FOUND_INF], none_finite)
        all_too_large = none_finite * (1.0 - overflowed)
        buffer[TOO_LARGE] = torch.maximum(buffer[TOO_LARGE], all_too_large)
        amaxes = self._amaxes if param_indices is None else self._amaxes[param_indices]
        amaxes = amaxes.to(buffer.device)
        if len(amaxes) and len(buffer) > HEADER:  # a rank may have no gradient
            buffer[AMAX] = torch.where(amaxes.isfinite(), amaxes, 0.0).amax()
            buffer[NAN] = torch.maximum(buffer[NAN], amaxes.isnan().any().float())
            buffer[HEADER:] = torch.maximum(buffer[HEADER:], amaxes)
        if self._of_ranks:
            nan, amax = self._of_ranks
            buffer[NAN] = torch.maximum(buffer[NAN], nan.to(buffer))
            buffer[AMAX] = amax.to(buffer)

    @property
    def none_finite(self) -> torch.Tensor:
        """1.0 if every micro-batch was left out, else 0.0."""
        return (self._finite_batches == 0).to(torch.float32)


def add_micro_batch(
    step: OptimizerStep, collected: Collected, context: CallContext
) -> None:
    """Check the gradients of a micro-batch, and add them up or leave them out."""
    grads, groups, plan = collected
    scale, iteration = context.tensor, context.iteration
    skips = overflowed = torch.zeros_like(scale)
    amaxes: torch.Tensor | None = None
    flags = torch.zeros(3, dtype=torch.float32, device=scale.device)
    if groups is not None:
        request = InspectionRequest(measure_amax=True)
        summary, found_inf = groups.measure(grads, GradientScale(scale), request)
        skips = any_flag(list(found_inf.values()), scale.device)
        overflowed = skips * (1.0 - summary.slot(TOO_LARGE).to(skips))
        amaxes = summary.amaxes_as_tensor()
        nan, amax = (summary.slot(index).to(skips) for index in (NAN, AMAX))
        flags = torch.stack([skips, nan, amax])
    of_ranks: list[torch.Tensor] = []
    if plan is not None:
        # A micro-batch is left out by all ranks or by none.
        reduced, loss = reduce_flags(plan, flags, overflowed, context.for_ranks())
        skips, overflowed, *of_ranks = reduced
        keep_loss_of_ranks(loss, context)
    iteration.is_accumulating = True
    if step.accumulator is None:
        step.accumulator = GradientAccumulator(step.optimizer, scale.device)
    # The next micro-batch has a loss of its own.
    loss_nonfinite = iteration.take_loss()
    if loss_nonfinite is not None:
        # A loss that is not finite leaves the scale.
        overflowed = overflowed * (1.0 - loss_nonfinite)
        skips = torch.maximum(skips, loss_nonfinite)
    iteration.micro_batches.append(MicroBatch(overflowed, loss_nonfinite))
    step.accumulator.add(
        skips=skips,
        overflowed=overflowed,
        amaxes=amaxes,
        inverse=invert(scale),
        of_ranks=of_ranks,
    )
    iteration.is_accumulating = False


def finish(
    step: OptimizerStep,
    accumulator: GradientAccumulator,
    checker: GradientChecker,
    context: CallContext,
) -> FoundInf:
    """Put the sums into the gradients and check them: a sum may overflow as well."""
    step.accumulator = None
    unit = torch.ones((), dtype=torch.float32, device=context.tensor.device)
    try:
        accumulator.restore_grads()
        found_inf, inspection = checker.check(
            step.optimizer,
            step,
            InspectionRequest(measure_amax=True),
            context,
            allow_fp16=True,
            inverse=unit,
        )
        raise_flags(found_inf, accumulator.none_finite)
        if inspection is not None:
            summary = inspection.summary
            indices = summary.param_indices
            accumulator.merge_into(summary.to_buffer(), indices, context.tensor)
    except BaseException:
        # The gradients carry no scale any more, and must not be unscaled again.
        step.mark_failed()
        raise
    return found_inf


def refuse_unsummable(groups: GradientGroups, grads: list[torch.Tensor]) -> None:
    """Raise for gradients that cannot be added up, before anything is taken."""
    if groups.has_sparse:
        message = (
            "accumulate() keeps dense sums, and an optimizer of sparse gradients wants "
            "sparse ones. Let them add up in .grad: call backward several times, then "
            "step."
        )
        raise GradientError(message)
    if groups.is_foreign:
        kinds = sorted({type(grad).__name__ for grad in grads})
        message = (
            "accumulate() adds plain tensors up, and these gradients are "
            f"{', '.join(kinds)}. Let them add up in .grad: call backward several "
            "times, then step."
        )
        raise GradientError(message)


def _upcast(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the precision in which it is added up."""
    if grad.is_complex():
        is_double = grad.dtype is torch.complex128
        return grad.to(torch.complex128 if is_double else torch.complex64)
    is_narrow = LIMITS[grad.dtype] < LIMITS[torch.float32]
    return grad.to(torch.float32) if is_narrow else grad.clone()
