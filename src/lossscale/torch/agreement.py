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

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import distributed

from lossscale.core.errors import DriftError
from lossscale.torch.ranks import Plan, Ranks, Share

_DRIFTED = 2.0**32
"""Stands in the lane of the flag for ranks that have come apart: above any count."""

_MIX = 2654435761
"""Spreads a small count over 32 bits."""


class Found(NamedTuple):
    """What ranks have found: float64 numbers, of no dimension."""

    bad: Any
    """1.0 if a step must be skipped, else 0.0."""
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


def agree(
    plan: Plan, found: Found, mark: Any, *, largest: bool, add_up: bool
) -> Agreed:
    """Return what all ranks of a plan have found together.

    Args:
        plan: The ranks.
        found: What this rank has found.
        mark: A whole number of 32 bits that must be the same on all ranks, in float64.
        largest: Whether the largest magnitude of all ranks is wanted.
        add_up: Whether sums of squares are to be added up. Only if both are wanted are
            there two collectives in a group.
    """
    bad = found.bad
    if add_up:
        bad, found = _by_sum(plan, found._replace(bad=bad), mark)
    if largest or not add_up:
        bad, found = _by_maximum(plan, found._replace(bad=bad), mark)
    return Agreed(found._replace(bad=(bad != 0).to(bad.dtype)), bad >= _DRIFTED)


def mark_of(scale: Any, good: Any) -> Any:
    """Return the mark of a scale and a count: 32 bits, in float64."""
    bits = scale.view(torch.int32).to(torch.int64) + good.to(torch.int64) * _MIX
    return (bits & 0xFFFFFFFF).to(torch.float64)


def _by_maximum(plan: Plan, found: Found, mark: Any) -> tuple[Any, Found]:
    bad, nan, amax, lost, peak, squares = found
    for at in plan.deciding:
        lanes = torch.stack([bad, nan, amax, lost, peak, mark, -mark])
        lanes = _reduced(lanes, plan.groups[at], distributed.ReduceOp.MAX)
        bad, nan, amax, lost, peak, high, low = lanes.unbind()
        bad = torch.where(high != -low, _DRIFTED, bad)
    return bad, Found(bad, nan, amax, lost, peak, squares)


def _by_sum(plan: Plan, found: Found, mark: Any) -> tuple[Any, Found]:
    bad, nan, lost = found.bad, found.nan, found.lost
    waiting: dict[Share, Any] = defaultdict(lambda: torch.zeros_like(bad))
    for share in plan.kinds:
        waiting[share] = waiting[share]
    waiting.update(found.squares)
    # Ranks have the same mark if these three have the same sum as if all were equal:
    # by their squares neither half can be above its mean, and by the mark not below.
    high, low = torch.floor(mark / 2**16), torch.remainder(mark, 2**16)
    marks = [mark, high * high, low * low]
    for at in sorted({*plan.deciding, *plan.adding}):
        ranks = plan.groups[at]
        # What is spread over the same groups from here on goes on as one sum.
        here = [share for share in sorted(waiting) if share[:1] == (at,)]
        lanes = torch.stack([bad, nan, lost, *marks, *(waiting[s] for s in here)])
        lanes = _reduced(lanes, ranks, distributed.ReduceOp.SUM)
        bad, nan, lost, *sums = lanes.unbind()
        ours = torch.stack(marks) * len(ranks.members)
        drifted = (torch.stack(sums[:3]) != ours).any() | (bad >= _DRIFTED)
        bad = torch.where(drifted, _DRIFTED, bad.clamp(max=1.0))
        nan, lost = nan.clamp(max=1.0), lost.clamp(max=1.0)
        for share, total in zip(here, sums[3:], strict=True):
            del waiting[share]
            waiting[share[1:]] = waiting[share[1:]] + total
    squares: dict[Share, Any] = {(): waiting[()]}
    return bad, found._replace(bad=bad, nan=nan, lost=lost, squares=squares)


def _reduced(lanes: Any, ranks: Ranks, operation: Any) -> Any:
    """Return lanes that were reduced over a group, where they came from."""
    there = lanes.to(_device(ranks.group, lanes.device))
    distributed.all_reduce(there, op=operation, group=ranks.group)
    return there.to(lanes.device)


def _device(group: Any, device: Any) -> Any:
    """Return a device whose tensors a group can reduce; the given one if it can."""
    kinds = {one.type for one in group._device_types}
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
        "them, and call update(new_scale) with the same number or on none."
    )
    raise DriftError(message)


def _listed(ranks: list[int]) -> str:
    """Return a few ranks by number, and how many more there are."""
    some = ", ".join(map(str, ranks[:_MOST]))
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"


_MOST = 8
"""How many ranks a message lists."""
