# SPDX-License-Identifier: Apache-2.0
"""One decision for all ranks: a few float64 numbers, one all-reduce for each group.

If only maxima are wanted, the numbers are reduced by MAX: whether a gradient is not
finite, or is NaN, is sent as 0 or 1, because no backend says what the maximum of NaN
is. The norm of sharded gradients needs a sum; then everything is reduced by SUM, and a
flag is set if its sum is not 0.

Each rank also sends a fingerprint of its scale and growth tracker. If fingerprints
differ, the gradients carry different scales and cannot be added up: all ranks skip the
step and raise the same error.

The numbers are Python floats on a CPU (`HostOps`), where nothing is asynchronous, and
tensors of no dimension elsewhere (`DeviceOps`), so that the host waits for none of
them.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import distributed

from lossscale.errors import DriftError
from lossscale.torch.devices import is_capturing
from lossscale.torch.distributed.rank_groups import RankGroup
from lossscale.torch.distributed.reduction_plan import ReductionPlan, Sharding
from lossscale.torch.torch_internals import device_types

TOO_LARGE = 1.0
"""A level: the gradients are finite and too large for the optimizer."""

OVERFLOW = 2.0**20
"""A level: gradients that are not finite. Larger than any number of ranks."""

_DRIFTED = 2.0**40
"""A level: scales differ between ranks. Larger than any sum of the others."""

_LATE = 2
"""How many checks later the host reads the drift flag. All ranks read it at the same
check, so that all of them raise."""

Number: TypeAlias = Any
"""A float, or a float64 tensor of no dimension: both take the same operators."""


class Findings(NamedTuple):
    """What the gradients of this rank, or of all ranks, were found to be."""

    level: Number
    """`OVERFLOW` or `TOO_LARGE` if the step must be skipped, else 0."""
    nan: Number
    """1 if a gradient is NaN."""
    amax: Number
    """The largest magnitude."""
    loss_nonfinite: Number
    """1 if a loss was not finite."""
    max_norm: Number
    """The norm, where it is the largest magnitude; 0 where it is not wanted."""
    squares: dict[Sharding, Number]
    """The sums of squares of the gradients, by their sharding."""


class HostOps:
    """Operations on Python floats."""

    @staticmethod
    def where(condition: Any, first: Number, second: Number) -> Number:
        """Return one of two numbers."""
        return first if condition else second

    @staticmethod
    def numbers(tensor: torch.Tensor) -> list[Number]:
        """Return the numbers of a tensor."""
        values: list[Number] = tensor.reshape(-1).tolist()
        return values

    @staticmethod
    def tensor(number: Number, _device: torch.device) -> torch.Tensor:
        """Return a number as a float64 tensor."""
        return torch.tensor(number, dtype=torch.float64, device="cpu")

    def all_reduce(
        self, numbers: list[Number], group: RankGroup, operation: "ReduceOp"
    ) -> list[Number]:
        """Return numbers reduced over a group."""
        payload = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return self.numbers(_all_reduce(payload, group, operation))


class DeviceOps:
    """Operations on tensors of no dimension."""

    @staticmethod
    def where(condition: Any, first: Number, second: Number) -> Number:
        """Return one of two numbers."""
        return torch.where(condition, first, second)

    @staticmethod
    def numbers(tensor: torch.Tensor) -> list[Number]:
        """Return the numbers of a tensor."""
        return list(tensor.reshape(-1).double().unbind())

    @staticmethod
    def tensor(number: Number, device: torch.device) -> torch.Tensor:
        """Return a number as a float64 tensor on a device."""
        moved: torch.Tensor = number.to(device)
        return moved

    def all_reduce(
        self, numbers: list[Number], group: RankGroup, operation: "ReduceOp"
    ) -> list[Number]:
        """Return numbers reduced over a group."""
        return self.numbers(_all_reduce(torch.stack(numbers), group, operation))


Ops: TypeAlias = HostOps | DeviceOps
ReduceOp: TypeAlias = Any
"""torch's reduce operations have no common type across versions."""


def ops_for(device: torch.device) -> Ops:
    """Return the operations for numbers of a device."""
    return HostOps() if device.type == "cpu" else DeviceOps()


def fingerprint_of(
    scale: torch.Tensor | None, growth_tracker: torch.Tensor | None, ops: Ops
) -> Number:
    """Return a 32-bit fingerprint of a scale and a growth tracker; 0 without them."""
    if scale is None or growth_tracker is None:
        return 0.0
    bits = scale.view(torch.int32)
    if isinstance(ops, HostOps):
        mixed = int(bits.item()) + int(growth_tracker.item()) * _SPREAD
        return float(mixed & 0xFFFFFFFF)
    spread = bits.to(torch.int64) + growth_tracker.to(torch.int64) * _SPREAD
    return (spread & 0xFFFFFFFF).to(torch.float64)


_SPREAD = 2654435761
"""Spreads a small count over 32 bits."""


def reduce_findings(
    plan: ReductionPlan,
    findings: Findings,
    fingerprint: Number,
    ops: Ops,
    *,
    wants_amax: bool,
    sums_squares: bool,
    level_of_norm: Callable[[Number], Number] = lambda norm: 0.0 * norm,
) -> tuple[Findings, Number]:
    """Return the findings of all ranks of a plan, and whether their scales differ.

    Args:
        plan: The ranks.
        findings: What this rank has found.
        fingerprint: A 32-bit number that must be the same on all ranks.
        ops: What kind of numbers these are.
        wants_amax: Whether the largest magnitude of all ranks is wanted.
        sums_squares: Whether sums of squares are to be added up. Only if both are
            wanted does a group need two collectives.
        level_of_norm: Returns the level that a norm implies, also for ranks that have
            no part in it.
    """
    if sums_squares:
        findings = _reduce_by_sum(plan, findings, fingerprint, ops, level_of_norm)
        norm = findings.squares[()] ** 0.5
        zero = 0.0 * findings.level
        findings = findings._replace(max_norm=ops.where(norm < math.inf, norm, zero))
    if wants_amax or not sums_squares:
        findings = _reduce_by_max(plan, findings, fingerprint, ops)
    drifted = findings.level >= _DRIFTED
    return findings._replace(level=_highest_level(findings.level, ops)), drifted


def _reduce_by_max(
    plan: ReductionPlan, findings: Findings, fingerprint: Number, ops: Ops
) -> Findings:
    level, nan, amax, loss, max_norm, squares = findings
    for index in plan.deciding:
        payload = [level, nan, amax, loss, max_norm, fingerprint, -fingerprint]
        group = plan.groups[index]
        payload = ops.all_reduce(payload, group, distributed.ReduceOp.MAX)
        level, nan, amax, loss, max_norm, highest, negated_lowest = payload
        differs = highest != -negated_lowest
        level = ops.where(differs, level * 0.0 + _DRIFTED, level)
    return Findings(level, nan, amax, loss, max_norm, squares)


def _reduce_by_sum(
    plan: ReductionPlan,
    findings: Findings,
    fingerprint: Number,
    ops: Ops,
    level_of_norm: Callable[[Number], Number],
) -> Findings:
    level, nan, loss = findings.level, findings.nan, findings.loss_nonfinite
    zero = level * 0.0
    pending = {(): zero, **dict.fromkeys(plan.shardings, zero), **findings.squares}
    # Ranks have the same fingerprint if these three have the sums that equal ones have:
    # by the squares neither half can be above its mean, and by the first not below.
    low = fingerprint % 2**16
    high = (fingerprint - low) / 2**16
    prints = [fingerprint, high * high, low * low]
    for index in sorted({*plan.deciding, *plan.summing}):
        group = plan.groups[index]
        # Sums that are sharded over the same groups from here on are one sum.
        reduced = [sharding for sharding in sorted(pending) if sharding[:1] == (index,)]
        if not any(pending):  # all squares are added up
            implied = level_of_norm(pending[()] ** 0.5)
            level = ops.where(implied > level, implied, level)
        payload = [level, nan, loss, *prints, *(pending[key] for key in reduced)]
        level, nan, loss, *sums = ops.all_reduce(
            payload, group, distributed.ReduceOp.SUM
        )
        drifted = level >= _DRIFTED
        for value, total in zip(prints, sums, strict=False):
            drifted = drifted | (total != value * len(group.members))
        level = ops.where(drifted, zero + _DRIFTED, _highest_level(level, ops))
        nan, loss = _as_flag(nan, ops), _as_flag(loss, ops)
        for sharding, total in zip(reduced, sums[len(prints) :], strict=True):
            del pending[sharding]
            remaining = sharding[1:]
            pending[remaining] = pending.get(remaining, zero) + total
    squares: dict[Sharding, Number] = {(): pending[()]}
    return findings._replace(level=level, nan=nan, loss_nonfinite=loss, squares=squares)


def _highest_level(number: Number, ops: Ops) -> Number:
    """Return the highest level among ranks, from the sum or the maximum of levels."""
    zero = number * 0.0
    level = ops.where(number >= OVERFLOW, zero + OVERFLOW, zero + TOO_LARGE)
    return ops.where(number > 0.0, level, zero)


def _as_flag(number: Number, ops: Ops) -> Number:
    """Return 1 for a number above 0, else 0."""
    return ops.where(number > 0.0, number * 0.0 + 1.0, number)


def _all_reduce(
    payload: torch.Tensor, group: RankGroup, operation: ReduceOp
) -> torch.Tensor:
    """Return numbers that were reduced over a group, on the device they came from."""
    copy = payload.to(_device_of(group, payload.device))
    distributed.all_reduce(copy, op=operation, group=group.group)
    return copy.to(payload.device)


def _device_of(group: RankGroup, device: torch.device) -> torch.device:
    """Return a device whose tensors a group can reduce; the given one if it can."""
    kinds = device_types(group.group)
    if device.type in kinds or not kinds:
        return device
    return torch.device("cuda" if "cuda" in kinds else min(kinds))


# -- scales that differ ----------------------------------------------------------------


def check_drift(
    plan: ReductionPlan,
    drifted: Number,
    scale: torch.Tensor | None,
    growth_tracker: torch.Tensor | None,
) -> None:
    """Raise if scales differ between ranks: at once, or when the host can know."""
    if isinstance(drifted, bool) or drifted.device.type != "cuda":
        if bool(drifted):
            _raise_drift(plan, scale, growth_tracker)
        return
    if is_capturing(drifted.device):
        return  # the step is skipped; a graph cannot raise
    copy = drifted.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(drifted.device))
    plan.late_drift.append((copy, event))
    if len(plan.late_drift) > _LATE:
        copy, event = plan.late_drift.popleft()
        event.synchronize()
        if bool(copy):
            _raise_drift(plan, scale, growth_tracker)


def _raise_drift(
    plan: ReductionPlan,
    scale: torch.Tensor | None,
    growth_tracker: torch.Tensor | None,
) -> None:
    """Raise on every rank, with the state of each of them.

    All ranks of a plan come here together, so they can be asked.
    """
    plan.late_drift.clear()
    local_state = (
        0.0 if scale is None else float(scale),
        0 if growth_tracker is None else int(growth_tracker),
    )
    states = {distributed.get_rank(): local_state}
    for group in plan.groups:
        dicts: list[dict[int, tuple[float, int]]] = [{} for _ in group.members]
        distributed.all_gather_object(dicts, states, group=group.group)
        for of_member in dicts:
            states |= of_member
    ranks: dict[tuple[float, int], list[int]] = defaultdict(list)
    for rank, state in sorted(states.items()):
        ranks[state].append(rank)
    text = "; ".join(
        f"{_list_ranks(members)} {scale:g} ({count} finite steps)"
        for (scale, count), members in ranks.items()
    )
    message = (
        f"Loss scales differ between ranks: {text}. The step was skipped on all "
        "ranks. Load the same state_dict() on every rank, and call update(new_scale) "
        "with the same number on all ranks or on none. If one scaler steps optimizers "
        "on different meshes, pass process_groups=."
    )
    raise DriftError(message)


def _list_ranks(ranks: list[int]) -> str:
    """Return a few ranks by number, how many more there are, and "is" or "are"."""
    some = ", ".join(map(str, ranks[:_LISTED]))
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"ranks {some}{more} have" if len(ranks) > 1 else f"rank {some} has"


_LISTED = 8
"""How many ranks a message lists."""
