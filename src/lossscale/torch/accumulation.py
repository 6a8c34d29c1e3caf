# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation that drops a bad micro-batch instead of the whole step.

torch adds scaled gradients up in `.grad`: one infinity among sixteen micro-batches
ruins all of them. Here every micro-batch is checked and then added to buffers of its
own, or not; which of the two is decided on the device.
"""

from typing import Any

import torch

from lossscale.errors import ContextError, GradientError
from lossscale.torch.eager import LIMITS, Request
from lossscale.torch.gradients import inverse_of, parameters
from lossscale.torch.sharding import local, put_back
from lossscale.torch.verdict import AMAX, HEADER, NAN, TOO_LARGE


class Sum:
    """What the micro-batches of one step add up to."""

    def __init__(self, optimizer: Any, device: Any) -> None:
        self.batches = 0
        self.good = torch.zeros((), device=device)
        self.overflowed = torch.zeros((), device=device)
        """1.0 if a micro-batch was not finite."""
        self.tops = torch.zeros(len(parameters(optimizer)), device=device)
        self.everywhere: list[Any] = []
        """Whether any rank had a NaN, and the largest magnitude, if ranks decide."""
        self._buffers: dict[int, Any] = {}
        """The sums; of a DTensor, of the part that is on this rank."""

    @torch.no_grad()
    def add(self, optimizer: Any, found: Any, tops: Any, inverse: Any) -> None:
        """Add the gradients of one micro-batch and take them off the parameters.

        Args:
            optimizer: Whose gradients.
            found: 1.0 if one of them is not finite, else 0.0.
            tops: The largest magnitude of each.
            inverse: What unscales them.
        """
        every = parameters(optimizer)
        if len(every) > len(self.tops):  # parameters that were added meanwhile
            more = self.tops.new_zeros(len(every) - len(self.tops))
            self.tops = torch.cat([self.tops, more])
        self.batches += 1
        finite = found == 0
        self.good += finite
        there = [at for at, p in enumerate(every) if p.grad is not None]
        tops = tops.to(self.tops.device)
        # NaN stays on top. An index of the host's, which a device waits for, is needed
        # only where a gradient is missing.
        if len(there) == len(every):
            self.tops = torch.maximum(self.tops, tops)
        else:
            self.tops[there] = torch.maximum(self.tops[there], tops)
        for parameter in every:
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            wide = _wide(gradient) * inverse.to(gradient.device)
            # A product with 0 would leave NaN; a choice does not.
            share = torch.where(finite.to(gradient.device), wide, 0.0)
            total = self._buffers.get(id(parameter))
            if total is None:
                self._buffers[id(parameter)] = share
            else:
                total.add_(share)
            parameter.grad = None

    @torch.no_grad()
    def give_back(self, optimizer: Any) -> None:
        """Put the sums into the gradients, as if no micro-batch were missing."""
        share = torch.where(self.good > 0, self.batches / self.good, 0.0)
        for parameter in parameters(optimizer):
            total = self._buffers.pop(id(parameter), None)
            if total is None:
                continue
            total.mul_(share.to(total.device))
            # torch 2.10 and later: a parameter may want gradients of another dtype.
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            parameter.grad = put_back(total.to(dtype), parameter)


def add(scaler: Any, optimizer: Any) -> None:
    """Add a micro-batch to the sum that a scaler keeps for an optimizer."""
    iteration = scaler._iteration
    known, gradients = scaler._gradients(optimizer)
    if known is not None:
        _refuse(known, gradients)
    flag, buffer = torch.zeros_like(scaler._scale), None
    overflow = flag
    if known is not None:
        request = Request(with_amax=True)
        buffer, found = known.measure(gradients, scaler._scale, None, request)
        flag = scaler._any(list(found.values()))
        overflow = flag * (1.0 - buffer[TOO_LARGE].to(flag))
    plan = scaler._plan(optimizer)
    if plan is not None:
        # A batch is dropped by all ranks or by none.
        own = torch.zeros(3, device=flag.device)
        if buffer is not None:
            own = torch.stack([flag, *(buffer[at].to(flag) for at in (NAN, AMAX))])
        flag, overflow, *seen = scaler._agreed_flags(plan, own, overflow).unbind()
    iteration.accumulating = True
    total = iteration.sums.get(id(optimizer))
    if total is None:
        total = iteration.sums[id(optimizer)] = Sum(optimizer, scaler._scale.device)
    if plan is not None:
        total.everywhere = list(map(torch.maximum, total.everywhere or seen, seen))
    if iteration.loss is None:
        iteration.dropped.append(overflow)
    else:
        # A loss that is not finite leaves the scale; the next batch has its own.
        lost, iteration.loss = iteration.loss, None
        iteration.lost.append(lost)
        overflow = overflow * (1.0 - lost)
        iteration.dropped.append(overflow)
        flag = torch.maximum(flag, lost)
    total.overflowed = torch.maximum(total.overflowed, overflow)
    if buffer is None:
        total.batches += 1
        total.good_steps += flag == 0
    else:
        total.add(optimizer, flag, buffer[HEADER:], inverse_of(scaler._scale))
    iteration.accumulating = False


def _refuse(known: Any, gradients: list[Any]) -> None:
    """Raise for gradients that cannot be added up, before anything is taken."""
    if known.sparse:
        message = (
            "accumulate() keeps dense sums, and an optimizer of sparse gradients wants "
            "sparse ones. Let them add up in .grad: call backward several times, then "
            "step."
        )
        raise GradientError(message)
    if known.foreign:
        kinds = sorted({type(gradient).__name__ for gradient in gradients})
        message = (
            "accumulate() adds plain tensors up, and these gradients are "
            f"{', '.join(kinds)}. Let them add up in .grad: call backward several "
            "times, then step."
        )
        raise GradientError(message)


def check_complete(optimizer: Any) -> None:
    """Raise if there are gradients that were not added up."""
    if any(parameter.grad is not None for parameter in parameters(optimizer)):
        message = (
            "Some gradients were not passed to accumulate(). Call "
            "accumulate(optimizer) after every backward()."
        )
        raise ContextError(message)


def finish(scaler: Any, optimizer: Any) -> None:
    """Put what was added up into the gradients and judge it, once."""
    total = scaler._iteration.sums.pop(id(optimizer))
    try:
        total.give_back(optimizer)
        scaler._judge_sum(optimizer, total)
    except BaseException:
        # They carry no scale any more, and must not be unscaled again.
        scaler._give_up(optimizer)
        raise


def _wide(gradient: Any) -> Any:
    """Return a gradient in the precision in which it is added up."""
    if gradient.is_complex():
        double = gradient.dtype is torch.complex128
        return gradient.to(torch.complex128 if double else torch.complex64)
    narrow = LIMITS[gradient.dtype] < LIMITS[torch.float32]
    return gradient.to(torch.float32) if narrow else gradient.clone()
