# SPDX-License-Identifier: Apache-2.0
"""One decision for all ranks: a few float64 numbers, one collective for each group.

What a rank has found is written into lanes. If all that matters is a maximum, they are
reduced by MAX: whether a gradient is not finite, or is NaN, as 0 or 1, because no
backend promises what the maximum of NaN is. A norm that is spread over ranks needs a
sum; then everything is reduced by SUM, and a flag is set if its sum is not 0.

Each rank also sends a mark of its scale and of the steps counted towards growth. Marks
that differ mean that the ranks have come apart: their gradients cannot be added up any
more. Then no rank takes the step, and every one of them raises the same error.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed

from lossscale.errors import DriftError
from lossscale.torch.ranks import Plan, Ranks, Share

TOO_LARGE = 1.0
"""In the lane of the flag: finite gradients that are too large for the optimizer."""

OVERFLOW = 2.0**20
"""The same: gradients that are not finite. Above any number of ranks."""

_DRIFTED = 2.0**40
"""The same: scales that differ between ranks. Above any sum of the others."""

_MIX = 2654435761
"""Spreads a small count over 32 bits."""


class Found(NamedTuple):
    """What ranks have found: Python numbers on a CPU, elsewhere float64 tensors."""

    bad: Any
    """`OVERFLOW` or `TOO_LARGE` if a step must be skipped, else 0.0."""
    nan: Any
    """1.0 if a gradient is NaN."""
    amax: Any
    """The largest magnitude."""
    lost: Any
    """1.0 if a loss was not finite."""
    peak: Any
    """The norm, where it is the largest magnitude; 0 where nobody wants it."""
    squares: dict[Share, Any]
    """The sum of squares of the gradients, by how they are spread."""


class Agreed(NamedTuple):
    """What all ranks go by."""

    found: Found
    drifted: Any
    """True if the ranks have come apart; they skip the step."""


class OnHost:
    """Lanes as Python numbers: where nothing is asynchronous they cost the least."""

    @staticmethod
    def where(condition: bool, first: Any, second: Any) -> Any:
        """Return one of two numbers."""
        return first if condition else second

    @staticmethod
    def numbers(tensor: Any) -> list[Any]:
        """Return the numbers of a tensor, as they are reckoned with."""
        listed: list[Any] = tensor.reshape(-1).tolist()
        return listed

    @staticmethod
    def tensor(number: Any, _device: Any) -> Any:
        """Return a number as a float64 tensor."""
        return torch.tensor(number, dtype=torch.float64, device="cpu")

    def reduced(self, lanes: list[Any], ranks: Ranks, operation: Any) -> list[Any]:
        """Return lanes that were reduced over a group."""
        cpu = torch.tensor(lanes, dtype=torch.float64, device="cpu")
        return self.numbers(_reduced(cpu, ranks, operation))


class OnDevice:
    """Lanes as tensors of no dimension: the host waits for none of them."""

    where = staticmethod(torch.where)

    @staticmethod
    def numbers(tensor: Any) -> list[Any]:
        """Return the numbers of a tensor, as they are reckoned with."""
        return list(tensor.reshape(-1).double().unbind())

    @staticmethod
    def tensor(number: Any, device: Any) -> Any:
        """Return a number as a float64 tensor on a device."""
        return number.to(device)

    def reduced(self, lanes: list[Any], ranks: Ranks, operation: Any) -> list[Any]:
        """Return lanes that were reduced over a group."""
        return self.numbers(_reduced(torch.stack(lanes), ranks, operation))


def reckoning(device: Any) -> OnHost | OnDevice:
    """Return how to reckon with what is on a device."""
    return OnHost() if device.type == "cpu" else OnDevice()


def agree(
    plan: Plan,
    found: Found,
    mark: Any,
    reckon: OnHost | OnDevice,
    *,
    largest: bool,
    add_up: bool,
    too_large: Callable[[Any], Any] = lambda norm: 0.0 * norm,
) -> Agreed:
    """Return what all ranks of a plan have found together.

    Args:
        plan: The ranks.
        found: What this rank has found.
        mark: A whole number of 32 bits that must be the same on all ranks.
        reckon: What kind of numbers these are.
        largest: Whether the largest magnitude of all ranks is wanted.
        add_up: Whether sums of squares are to be added up. Only if both are wanted are
            there two collectives in a group.
        too_large: Returns what a norm makes of the step, as `Found.bad_steps` has it, also
            for ranks that have no part in it.
    """
    if add_up:
        found = _by_sum(plan, found, mark, reckon, too_large)
        norm = found.squares[()] ** 0.5
        finite = norm < math.inf
        found = found._replace(peak=reckon.where(finite, norm, 0.0 * found.bad_steps))
    if largest or not add_up:
        found = _by_maximum(plan, found, mark, reckon)
    drifted = found.bad_steps >= _DRIFTED
    return Agreed(found._replace(bad=_level(found.bad_steps, reckon)), drifted)


def mark_of(scale: Any, good: Any, reckon: OnHost | OnDevice) -> Any:
    """Return the mark of a scale and a count: a whole number of 32 bits."""
    bits = scale.view(torch.int32)
    if isinstance(reckon, OnHost):
        return float((bits.item() + good.item() * _MIX) & 0xFFFFFFFF)
    mixed = bits.to(torch.int64) + good.to(torch.int64) * _MIX
    return (mixed & 0xFFFFFFFF).to(torch.float64)


def _flag(number: Any, reckon: OnHost | OnDevice) -> Any:
    """Return 1 for what is above 0, else 0."""
    return reckon.where(number > 0.0, number * 0.0 + 1.0, number)


def _level(number: Any, reckon: OnHost | OnDevice) -> Any:
    """Return the worst of what ranks have found, from its sum or maximum."""
    zero = number * 0.0
    level = reckon.where(number >= OVERFLOW, zero + OVERFLOW, zero + TOO_LARGE)
    return reckon.where(number > 0.0, level, zero)


def _by_maximum(
    plan: Plan, found: Found, mark: Any, reckon: OnHost | OnDevice
) -> Found:
    bad, nan, amax, lost, peak, squares = found
    for at in plan.deciding:
        lanes = [bad, nan, amax, lost, peak, mark, -mark]
        lanes = reckon.reduced(lanes, plan.groups[at], distributed.ReduceOp.MAX)
        bad, nan, amax, lost, peak, high, low = lanes
        bad = reckon.where(high != -low, bad * 0.0 + _DRIFTED, bad)
    return Found(bad, nan, amax, lost, peak, squares)


def _by_sum(
    plan: Plan,
    found: Found,
    mark: Any,
    reckon: OnHost | OnDevice,
    too_large: Callable[[Any], Any],
) -> Found:
    bad, nan, lost = found.bad_steps, found.nan, found.lost
    zero = bad * 0.0
    waiting = {(): zero, **dict.fromkeys(plan.kinds, zero), **found.squares}
    # Ranks have the same mark if these three have the same sum as if all were equal:
    # by their squares neither half can be above its mean, and by the mark not below.
    low = mark % 2**16
    high = (mark - low) / 2**16
    marks = [mark, high * high, low * low]
    for at in sorted({*plan.deciding, *plan.adding}):
        ranks = plan.groups[at]
        # What is spread over the same groups from here on goes on as one sum.
        here = [share for share in sorted(waiting) if share[:1] == (at,)]
        if not any(waiting):  # all of it is added up
            beyond = too_large(waiting[()] ** 0.5)
            bad = reckon.where(beyond > bad, beyond, bad)
        lanes = [bad, nan, lost, *marks, *(waiting[share] for share in here)]
        lanes = reckon.reduced(lanes, ranks, distributed.ReduceOp.SUM)
        bad, nan, lost, *sums = lanes
        drifted = bad >= _DRIFTED
        for own, total in zip(marks, sums, strict=False):
            drifted = drifted | (total != own * len(ranks.members))
        bad = reckon.where(drifted, zero + _DRIFTED, _level(bad, reckon))
        nan, lost = _flag(nan, reckon), _flag(lost, reckon)
        for share, total in zip(here, sums[len(marks) :], strict=True):
            del waiting[share]
            waiting[share[1:]] = waiting.get(share[1:], zero) + total
    squares: dict[Share, Any] = {(): waiting[()]}
    return found._replace(bad=bad, nan=nan, lost=lost, squares=squares)


def _reduced(lanes: Any, ranks: Ranks, operation: Any) -> Any:
    """Return lanes that were reduced over a group, where they came from."""
    there = lanes.to(_device(ranks.group, lanes.device))
    distributed.all_reduce(there, op=operation, group=ranks.group)
    return there.to(lanes.device)


def _device(group: Any, device: Any) -> Any:
    """Return a device whose tensors a group can reduce; the given one if it can."""
    kinds = {one.type for one in getattr(group, "_device_types", ())}
    if device.type in kinds or not kinds:
        return device
    kind = "cuda" if "cuda" in kinds else min(kinds)
    return torch.device(kind)


def raise_drift(plan: Plan, scale: Any, good: Any) -> None:
    """Raise on every rank, with what each of them has.

    All ranks of a plan come here together, so they can be asked.
    """
    known = {distributed.get_rank(): (float(scale), int(good))}
    for ranks in plan.groups:
        gathered: list[Any] = [None] * len(ranks.members)
        distributed.all_gather_object(gathered, known, group=ranks.group)
        for others in gathered:
            known |= others
    by_state: dict[tuple[float, int], list[int]] = defaultdict(list)
    for rank, state in sorted(known.items()):
        by_state[state].append(rank)
    has = "; ".join(
        f"{_listed(found)}: scale {state[0]:g}, {state[1]} clean steps"
        for state, found in by_state.items()
    )
    message = (
        f"The ranks have come apart: {has}. No rank took the step. Gradients of "
        "different scales cannot be added up: load the same state_dict() on all of "
        "them, and call update(new_scale) with the same number or on none. If one "
        "scaler steps optimizers on different meshes, declare process_group=."
    )
    raise DriftError(message)


def _listed(ranks: list[int]) -> str:
    """Return a few ranks by number, and how many more there are."""
    some = ", ".join(map(str, ranks[:_MOST]))
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"


_MOST = 8
"""How many ranks a message lists."""
