# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation that drops a bad micro-batch instead of the whole step.

torch adds scaled gradients up in `.grad`: one infinity among sixteen micro-batches
ruins all of them. Here every micro-batch is checked and then added to buffers of its
own, or not; which of the two is decided on the device.
"""

from typing import Any

import torch

from lossscale.torch.eager import LIMITS, Request
from lossscale.torch.gradients import inverse_of, parameters
from lossscale.torch.verdict import HEADER


class Sum:
    """What the micro-batches of one step add up to."""

    def __init__(self, device: Any) -> None:
        self.batches = 0
        self.good = torch.zeros((), device=device)
        self.tops: Any = None
        self._buffers: dict[int, Any] = {}

    @torch.no_grad()
    def add(self, optimizer: Any, found: Any, tops: Any, inverse: Any) -> None:
        """Add the gradients of one micro-batch and take them off the parameters.

        Args:
            optimizer: Whose gradients.
            found: 1.0 if one of them is not finite, else 0.0.
            tops: The largest magnitude of each.
            inverse: What unscales them.
        """
        self.batches += 1
        finite = found == 0
        self.good += finite
        if self.tops is None or self.tops.shape != tops.shape:
            self.tops = tops
        else:
            self.tops = torch.maximum(self.tops, tops)  # NaN stays on top
        for parameter in parameters(optimizer):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            wide = _wide(gradient) * inverse.to(gradient.device)
            # A product with 0 would leave NaN; a choice does not.
            there = torch.where(finite.to(gradient.device), wide, 0.0)
            total = self._buffers.get(id(parameter))
            if total is None:
                self._buffers[id(parameter)] = there
            else:
                total.add_(there)
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
            parameter.grad = total.to(parameter.dtype)


def add(scaler: Any, optimizer: Any) -> None:
    """Add a micro-batch to the sum that a scaler keeps for an optimizer."""
    iteration = scaler._iteration
    known, gradients = scaler._gradients(optimizer)
    total = iteration.sums.get(id(optimizer))
    if total is None:
        total = iteration.sums[id(optimizer)] = Sum(scaler._scale.device)
    if known is None:
        total.batches += 1
        total.good += 1.0
        return
    buffer, found = known.measure(gradients, scaler._scale, None, Request())
    flags = list(found.values())
    if iteration.loss is not None:
        flags.append(iteration.loss)
        iteration.loss = None  # the next micro-batch has a loss of its own
    flag = scaler._any(flags)
    iteration.dropped.append(flag)
    total.add(optimizer, flag, buffer[HEADER:], inverse_of(scaler._scale))


def finish(scaler: Any, optimizer: Any) -> None:
    """Put what was added up into the gradients and judge it, once."""
    total = scaler._iteration.sums.pop(id(optimizer), None)
    if total is None:
        return
    total.give_back(optimizer)
    scaler._judge_sum(optimizer, total)


def _wide(gradient: Any) -> Any:
    """Return a gradient in the precision in which it is added up."""
    if gradient.is_complex():
        double = gradient.dtype is torch.complex128
        return gradient.to(torch.complex128 if double else torch.complex64)
    narrow = LIMITS[gradient.dtype] < LIMITS[torch.float32]
    return gradient.to(torch.float32) if narrow else gradient.clone()
