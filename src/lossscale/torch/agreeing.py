# SPDX-License-Identifier: Apache-2.0
"""How a scaler comes to one decision with the scalers of other ranks.

Every look at gradients goes through here if other ranks have a say, whether they are
unscaled, clipped, added up or handed to a fused optimizer. What the look has found is
agreed on before anything is decided, so that nothing has changed yet if another rank
does not answer.
"""

import math
from collections import deque
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lossscale.core.errors import ContextError
from lossscale.torch import agreement, eager
from lossscale.torch.agreement import Agreed, Found
from lossscale.torch.devices import capturing
from lossscale.torch.eager import Request
from lossscale.torch.gradients import Sorted, parameters
from lossscale.torch.keeping import Keeping
from lossscale.torch.ranks import Declared, Plan, Share
from lossscale.torch.sharding import dtensor_class
from lossscale.torch.verdict import AMAX, FOUND, HEADER, NAN, NORM

_LATE = 2
"""After so many looks the host asks a device whether the ranks had come apart. Every
rank asks at the same look, so that all of them raise."""


class Agreeing(Keeping):
    """Decides together with other ranks."""

    _declared = Declared()
    _unpickled = (*Keeping._unpickled, "_plans", "_marks")

    def _open(self) -> None:
        super()._open()
        self._plans: Any = WeakKeyDictionary()
        self._marks: deque[tuple[Plan, Any, Any]] = deque()

    def _plan(self, optimizer: Any) -> Plan | None:
        """Return which ranks decide about an optimizer; `None` if this one alone."""
        if not self._declared.agreeing and dtensor_class() is None:
            return None
        plan: Plan | None = None
        with suppress(TypeError):  # nothing to remember it by
            plan = self._plans.get(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if plan is None or plan.parameters != count:
            plan = Plan(self._declared, parameters(optimizer))
            with suppress(TypeError):
                self._plans[optimizer] = plan
        return plan if plan.groups else None

    def _measure(
        self,
        plan: Plan,
        known: Sorted | None,
        gradients: list[Any],
        carried: tuple[Any, Any],
        request: Request,
    ) -> tuple[Any, dict[Any, Any]]:
        """Return the verdict of all ranks, and the flag of each device.

        Args:
            plan: The ranks.
            known: How the gradients are sorted; `None` if this rank has none.
            gradients: The parts that this rank has of them.
            carried: The scale that they carry, and its inverse; one may be `None`.
            request: What is wanted.
        """
        scale, inverse = carried
        device = (inverse if scale is None else scale).device
        spread = request.wants_norm and bool(plan.adding)
        by_sum = spread and request.norm_type != math.inf
        part = request._replace(max_norm=math.inf, with_norm=True)
        if known is None:
            buffers = [eager.nothing(scale, inverse)]
        else:
            buffers = known.parts(
                gradients, scale, inverse, part if spread else request
            )
        if not spread and known is not None:
            buffer, found = known.together(buffers, device, request)
        else:
            buffer, found = None, {}
        headers = [buffer] if buffer is not None else buffers
        local = torch.stack([one[:HEADER].to(device) for one in headers]).double()
        squares: dict[Share, Any] = {}
        if by_sum:
            shares = [()] if known is None else [group.share for group in known.groups]
            for share, square in zip(shares, local[:, NORM].square(), strict=True):
                squares[share] = squares.get(share, 0.0) + square
        norms = local[:, NORM]
        peak = torch.where(norms.isfinite(), norms, 0.0).amax()
        largest = local.amax(0)
        agreed = self._agree(
            plan,
            bad=largest[FOUND],
            nan=largest[NAN],
            amax=largest[AMAX],
            peak=peak if spread and not by_sum else None,
            squares=squares if by_sum else None,
        )
        if buffer is not None:
            answer = torch.stack([agreed.bad, agreed.nan, agreed.amax])
            buffer[:NORM] = answer.to(buffer.device, torch.float32)
            for flag in found.values():
                flag.copy_(buffer[FOUND])
            return buffer, found
        norm = None
        if by_sum:
            norm = agreed.squares[()].sqrt()
        elif spread:
            norm = torch.where(agreed.bad != 0, math.inf, agreed.peak)
            norm = torch.where(agreed.nan != 0, math.nan, norm)
        buffer = eager.combine(
            buffers, device, request, (agreed.bad, agreed.nan, agreed.amax, norm)
        )
        if known is None:
            return buffer, {buffer.device: buffer[FOUND]}
        return known.in_order(buffer)

    def _agree(
        self,
        plan: Plan,
        *,
        bad: Any,
        nan: Any = None,
        amax: Any = None,
        peak: Any = None,
        squares: dict[Any, Any] | None = None,
    ) -> Found:
        """Return what all ranks have found, from what this one has.

        Args:
            plan: The ranks.
            bad: Whether the step must be skipped.
            nan: Whether a gradient is NaN.
            amax: The largest magnitude.
            peak: The norm, where it is the largest magnitude.
            squares: The sums of squares, where they are to be added up.
        """
        bad = bad.double()
        zero = torch.zeros_like(bad)
        loss = self._iteration.loss
        lost = zero if loss is None else loss.double().to(bad.device)
        found = Found(
            torch.maximum(bad, lost),
            zero if nan is None else nan,
            zero if amax is None else amax,
            lost,
            zero if peak is None else peak,
            squares or {},
        )
        mark = zero
        if self._scale is not None:
            mark = agreement.mark_of(self._scale, self._growth_tracker).to(bad.device)
        agreed = agreement.agree(
            plan,
            found,
            mark,
            largest=not self._rule.is_ours,
            add_up=squares is not None,
        )
        self._watch(plan, agreed)
        if self._rule.checks_loss:
            self._iteration.loss = agreed.found.lost.float()
        return agreed.found

    def _agree_on_flags(
        self, plan: Plan | None, found: dict[Any, Any]
    ) -> dict[Any, Any]:
        """Return flags that all ranks share, from flags that somebody else made."""
        if plan is None:
            return found
        agreed = self._agree(plan, bad=self._any(list(found.values())))
        together = agreed.bad.float()
        for flag in found.values():
            flag.copy_(together.expand_as(flag))
        return found or {together.device: together}

    def _watch(self, plan: Plan, agreed: Agreed) -> None:
        """Raise if the ranks have come apart: at once, or when the host can know."""
        drifted = agreed.drifted
        if drifted.device.type != "cuda":
            if bool(drifted):
                self._raise_drift(plan)
            return
        if capturing(drifted.device):
            return  # the step is skipped; a graph has nobody to tell
        copy = drifted.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(drifted.device))
        self._marks.append((plan, copy, event))
        if len(self._marks) > _LATE:
            plan, copy, event = self._marks.popleft()
            event.synchronize()
            if bool(copy):
                self._raise_drift(plan)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled; raise if process groups were to be among it."""
        if self._declared.agreeing:
            message = (
                "A scaler that was made with process_group=, meshes= or sharded= "
                "cannot be pickled or copied: process groups belong to their process. "
                "Save scaler.state_dict() and load it into a new one."
            )
            raise ContextError(message)
        return super().__getstate__()

    def _raise_drift(self, plan: Plan) -> None:
        self._marks.clear()
        agreement.raise_drift(plan, self._scale, self._growth_tracker)
