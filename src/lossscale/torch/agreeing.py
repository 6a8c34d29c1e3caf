# SPDX-License-Identifier: Apache-2.0
"""How a scaler comes to one decision with the scalers of other ranks.

Every look at gradients goes through here if other ranks have a say, whether they are
unscaled, clipped, added up or handed to a fused optimizer. What the look has found is
agreed on before anything is decided, so that nothing has changed yet if another rank
does not answer.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lossscale.core.validation import FLOAT32_MAX
from lossscale.errors import ContextError
from lossscale.torch import agreement, eager
from lossscale.torch.agreement import (
    OVERFLOW,
    TOO_LARGE,
    Agreed,
    Found,
    OnDevice,
    OnHost,
)
from lossscale.torch.devices import capturing
from lossscale.torch.eager import EPSILON, Request
from lossscale.torch.gradients import Sorted, parameters
from lossscale.torch.keeping import Keeping
from lossscale.torch.ranks import Declared, Plan, Share
from lossscale.torch.sharding import dtensor_class
from lossscale.torch.verdict import (
    AMAX,
    FOUND,
    HEADER,
    NAN,
    NORM,
    NOT_MEASURED,
    SCALE,
)
from lossscale.torch.verdict import TOO_LARGE as TOO_LARGE_FLAG

_LATE = 2
"""After so many looks the host asks a device whether the ranks had come apart. Every
rank asks at the same look, so that all of them raise."""


class Agreeing(Keeping):
    """Decides together with other ranks."""

    _declared = Declared()
    _unpickled = (*Keeping._unpickled, "_plans")

    def _open(self) -> None:
        super()._open()
        self._plans: Any = WeakKeyDictionary()

    def _plan(self, optimizer: Any) -> Plan | None:
        """Return which ranks decide about an optimizer; `None` if this one alone."""
        if not self._declared.agreeing and dtensor_class() is None:
            return None
        plan: Plan | None = None
        with suppress(TypeError):  # nothing to remember it by
            plan = self._plans.get(optimizer)
        if plan is None or not plan.fits(optimizer.param_groups):
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
        # By the request alone: other ranks of a group may have nothing to add up.
        add_up = request.wants_norm and request.norm_type != math.inf
        reckon = agreement.reckoning(device)
        buffer: Any = None
        found: dict[Any, Any] = {}
        if known is None:
            headers = [eager.nothing(scale, inverse)]
        else:
            wanted = request
            if spread:  # nothing is clipped before the norm of all is known
                wanted = request.without_clipping()._replace(with_norm=True)
            headers = known.parts(gradients, scale, inverse, wanted)
            if not spread:
                buffer, found = known.together(headers, device, request)
        parts = headers if buffer is None else [buffer]
        rows = [reckon.numbers(one[:HEADER].to(device)) for one in parts]
        peak = _largest(rows, NORM, reckon)  # one that is infinite has set the flag
        agreed = self._agree(
            plan,
            reckon,
            bad=_worst(rows, reckon),
            nan=_largest(rows, NAN, reckon),
            amax=_largest(rows, AMAX, reckon),
            peak=peak if request.wants_norm and not add_up else None,
            squares=_squares(known, rows, spread=spread) if add_up else None,
            too_large=partial(_too_large, rows[0][SCALE], request, reckon),
        )
        bad, nan, amax, norm = (
            reckon.tensor(number, device)
            for number in (agreed.bad_steps, agreed.nan, agreed.amax, agreed.peak)
        )
        finite, too_large = bad < OVERFLOW, bad == TOO_LARGE
        norm = torch.where(finite, norm, math.inf)
        norm = torch.where(nan != 0, math.nan, norm)
        if buffer is not None:
            answer = torch.stack([(bad != 0).to(nan), nan, amax])
            buffer[:NORM] = answer.to(buffer.device, torch.float32)
            buffer[TOO_LARGE_FLAG] = too_large.to(buffer)
            for flag in found.values():
                flag.copy_(buffer[FOUND])
        else:
            own = reckon.tensor(agreed.squares[()], device).sqrt() if add_up else norm
            buffer = eager.combine(
                headers,
                device,
                request,
                (finite, too_large, nan, amax, own if spread else None),
            )
            found = {device: buffer[FOUND]}
            if known is not None:
                buffer, found = known.in_order(buffer)
        if request.wants_norm and not self._rule.is_ours:
            # A policy is told the same on all ranks, whatever each of them has.
            buffer[NORM] = norm.to(buffer)
        return buffer, found

    def _agree(
        self,
        plan: Plan,
        reckon: OnHost | OnDevice,
        *,
        bad: Any,
        nan: Any = None,
        amax: Any = None,
        peak: Any = None,
        squares: dict[Any, Any] | None = None,
        too_large: Callable[[Any], Any] = lambda norm: 0.0 * norm,
    ) -> Found:
        """Return what all ranks have found, from what this one has.

        Args:
            plan: The ranks.
            reckon: What kind of numbers these are.
            bad: Whether the step must be skipped, as `Found` has it.
            nan: Whether a gradient is NaN.
            amax: The largest magnitude.
            peak: The norm, where it is the largest magnitude.
            squares: The sums of squares, where they are to be added up.
            too_large: Returns what a norm makes of the step.
        """
        zero = mark = 0.0 * bad
        loss, lost = self._iteration.loss, zero
        if loss is not None:
            (lost,) = reckon.numbers(loss)
        found = Found(
            reckon.where(lost > 0.0, zero + OVERFLOW, bad),
            zero if nan is None else nan,
            zero if amax is None else amax,
            lost,
            zero if peak is None else peak,
            squares or {},
        )
        if self._scale is not None:
            mark = agreement.mark_of(self._scale, self._growth_tracker, reckon)
        agreed = agreement.agree(
            plan,
            found,
            mark,
            reckon,
            largest=not self._rule.is_ours,
            add_up=squares is not None,
            too_large=too_large,
        )
        self._watch(plan, agreed)
        if self._rule.checks_loss:
            lost = reckon.tensor(agreed.found.lost, self._scale.device)
            self._iteration.loss = lost.float()
        return agreed.found

    def _agreed_flags(self, plan: Plan, flags: Any, overflow: Any = None) -> Any:
        """Return what all ranks have found, from a flag, or from the start of a header.

        Args:
            plan: The ranks.
            flags: Whether to skip, whether there is a NaN, and the largest magnitude;
                or the first of these alone.
            overflow: Whether a gradient is not finite; `None` if that is the flag.

        Returns:
            Whether to skip, whether a gradient is not finite, whether there is a NaN,
            and the largest magnitude.
        """
        reckon = agreement.reckoning(flags.device)
        known = dict(zip(("bad", "nan", "amax"), reckon.numbers(flags), strict=False))
        known["bad"] = known["bad"] * OVERFLOW
        if overflow is not None:
            (worst,) = reckon.numbers(overflow)
            is_too_large = (known["bad"] > 0.0) & (worst == 0.0)
            zero = 0.0 * known["bad"]
            known["bad"] = reckon.where(is_too_large, zero + TOO_LARGE, known["bad"])
        found = self._agree(plan, reckon, **known)
        skips = reckon.where(
            found.bad_steps > 0.0, 1.0 + 0.0 * found.bad_steps, found.bad_steps
        )
        overflows = reckon.where(found.bad_steps >= OVERFLOW, skips, 0.0 * skips)
        numbers = [
            reckon.tensor(number, flags.device)
            for number in (skips, overflows, found.nan, found.amax)
        ]
        return torch.stack(numbers).float()

    def _agree_on_flags(
        self, plan: Plan | None, found: dict[Any, Any]
    ) -> dict[Any, Any]:
        """Return flags that all ranks share, from flags that somebody else made."""
        if plan is None:
            return found
        together = self._agreed_flags(plan, self._any(list(found.values())))[0]
        for flag in found.values():
            flag.copy_(together.expand_as(flag))
        return found or {together.device: together}

    def _watch(self, plan: Plan, agreed: Agreed) -> None:
        """Raise if the ranks have come apart: at once, or when the host can know."""
        drifted = agreed.drifted
        if isinstance(drifted, bool) or drifted.device.type != "cuda":
            if bool(drifted):
                self._raise_drift(plan)
            return
        if capturing(drifted.device):
            return  # the step is skipped; a graph has nobody to tell
        copy = drifted.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(drifted.device))
        plan.late.append((copy, event))
        if len(plan.late) > _LATE:
            copy, event = plan.late.popleft()
            event.synchronize()
            if bool(copy):
                self._raise_drift(plan)

    def _check_scale_growth_tracker(self, funcname: str) -> Any:
        if self._scale is None and self._declared.agreeing:
            # A pipeline stage without a loss has scaled nothing, and takes part.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

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
        plan.late.clear()
        agreement.raise_drift(plan, self._scale, self._growth_tracker)


def _largest(rows: list[list[Any]], at: int, reckon: OnHost | OnDevice) -> Any:
    """Return the largest number of a column; NaN and infinity are none.

    Where nobody has measured it, it stays what says so.
    """
    top = 0.0 * rows[0][FOUND] + NOT_MEASURED
    for row in rows:
        above = (row[at] > top) & (row[at] < math.inf)
        top = reckon.where(above, row[at], top)
    return top


def _squares(
    known: Sorted | None, rows: list[list[Any]], *, spread: bool
) -> dict[Share, Any]:
    """Return the sums of squares by how the gradients are spread."""
    shares: list[Share] = [()] * len(rows)
    if spread and known is not None:
        shares = [group.share for group in known.groups]
    squares: dict[Share, Any] = {}
    for share, row in zip(shares, rows, strict=True):
        squares[share] = squares.get(share, 0.0) + row[NORM] * row[NORM]
    return squares


def _too_large(
    scale: Any, request: Request, reckon: OnHost | OnDevice, norm: Any
) -> Any:
    """Return what a norm makes of a step, as `eager` says it: 0.0 if it can be clipped.

    Ranks outside of those that it was added up over have to know it too.
    """
    zero = 0.0 * scale
    if request.max_norm == math.inf:
        return zero
    level = zero
    if request.in_optimizer:
        fits = scale * (norm + EPSILON) <= FLOAT32_MAX * request.max_norm
        level = reckon.where(fits, zero, zero + OVERFLOW)
    return reckon.where(norm <= FLOAT32_MAX, level, zero + TOO_LARGE)


def _worst(rows: list[list[Any]], reckon: OnHost | OnDevice) -> Any:
    """Return what the gradients of all groups come to, as `Found.bad_steps` has it."""
    worst = 0.0 * rows[0][FOUND]
    for row in rows:
        level = reckon.where(
            row[TOO_LARGE_FLAG] > 0.0, TOO_LARGE + 0.0 * worst, OVERFLOW + 0.0 * worst
        )
        level = reckon.where(row[FOUND] > 0.0, level, 0.0 * worst)
        worst = reckon.where(level > worst, level, worst)
    return worst
