# SPDX-License-Identifier: Apache-2.0
"""Measuring gradients together with other ranks: the same summary on all of them.

If each rank has whole gradients, its summary is made first and its flags are reduced.
If gradients are sharded and a norm is wanted, the squares of the shards are reduced,
and the summary is made of their sum.
"""

import math
from functools import partial
from typing import NamedTuple

import torch

from lossscale.core.validation import FLOAT32_MAX
from lossscale.torch.distributed import consensus
from lossscale.torch.distributed.consensus import OVERFLOW, Findings, Number, Ops
from lossscale.torch.distributed.consensus import TOO_LARGE as TOO_LARGE_LEVEL
from lossscale.torch.distributed.reduction_plan import ReductionPlan, Sharding
from lossscale.torch.inspection import eager
from lossscale.torch.inspection.groups import FoundInf, GradientGroups, GradientScale
from lossscale.torch.inspection.request import EPSILON, InspectionRequest
from lossscale.torch.inspection.summary import (
    AMAX,
    FOUND_INF,
    HEADER,
    NAN,
    NORM,
    NOT_MEASURED,
    SCALE,
    TOO_LARGE,
    GradientSummary,
)


class RankContext(NamedTuple):
    """What the ranks must share besides their gradients."""

    scale: torch.Tensor | None
    growth_tracker: torch.Tensor | None
    loss_nonfinite: torch.Tensor | None
    """1.0 if a loss of this rank was not finite and holds the scale; `None` if not
    checked."""
    wants_amax: bool
    """Whether the policy reads magnitudes, which must then be the same on all ranks."""


def measure_over_ranks(
    groups: GradientGroups | None,
    grads: list[torch.Tensor],
    plan: ReductionPlan,
    gradient_scale: GradientScale,
    request: InspectionRequest,
    context: RankContext,
) -> tuple[GradientSummary, FoundInf, Number]:
    """Return the summary of all ranks, the flags, and whether a loss was not finite.

    Args:
        groups: The groups of this rank's gradients; `None` if it has none.
        grads: The gradients.
        plan: The ranks.
        gradient_scale: The scale of the gradients.
        request: What to measure.
        context: What else the ranks must share.
    """
    device = gradient_scale.tensor.device
    ops = consensus.ops_for(device)
    is_sharded = request.wants_norm and bool(plan.summing)
    if groups is None or is_sharded:
        buffers = [_empty_buffer(gradient_scale)]
        if groups is not None:
            buffers = groups.measure_groups(grads, gradient_scale, request.for_group())
        rows = [ops.numbers(buffer[:HEADER].to(device)) for buffer in buffers]
        findings = _reduce(groups, rows, plan, request, context, ops)
        totals = _total(findings, ops, device, has_norm=is_sharded)
        buffer = eager.combine(buffers, device, request, totals)
        if groups is None:
            summary = GradientSummary(buffer)
            found_inf = {device: buffer[FOUND_INF]}
        else:
            summary, found_inf = groups.reorder(buffer)
    else:
        summary, found_inf = groups.measure(grads, gradient_scale, request)
        header = summary.numbers[:HEADER]
        row = ops.numbers(header) if isinstance(header, torch.Tensor) else header
        findings = _reduce(groups, [row], plan, request, context, ops)
        _write(summary, found_inf, findings, ops)
    if request.wants_norm and context.wants_amax:
        summary.numbers[NORM] = _norm_of(findings, ops)
    return summary, found_inf, findings.loss_nonfinite


def reduce_flags(
    plan: ReductionPlan,
    flags: torch.Tensor,
    overflow: torch.Tensor | None,
    context: RankContext,
) -> tuple[list[torch.Tensor], Number]:
    """Return the flags of all ranks, from those that were found without an inspection.

    Args:
        plan: The ranks.
        flags: Whether to skip, whether there is a NaN, and the largest magnitude; or
            the first of these alone.
        overflow: Whether a gradient is not finite; `None` if that is what the flag
            says.
        context: What else the ranks must share.

    Returns:
        Whether to skip, whether a gradient is not finite, whether there is a NaN, and
        the largest magnitude; and whether a loss was not finite.
    """
    device = flags.device
    ops = consensus.ops_for(device)
    found_inf, *measured = ops.numbers(flags)
    zero = 0.0 * found_inf
    nan, amax = measured or (zero, zero)
    level = found_inf * OVERFLOW
    if overflow is not None:
        (overflowed,) = ops.numbers(overflow)
        only_large = (found_inf > 0.0) & (overflowed == 0.0)
        level = ops.where(only_large, zero + TOO_LARGE_LEVEL, level)
    local_findings = Findings(level, nan, amax, zero, zero, {})
    findings = _reduce_own(local_findings, plan, context, ops, sums_squares=False)
    skips = ops.where(findings.level > 0.0, zero + 1.0, zero)
    overflows = ops.where(findings.level >= OVERFLOW, zero + 1.0, zero)
    numbers = (skips, overflows, findings.nan, findings.amax)
    reduced = [ops.tensor(number, device).float() for number in numbers]
    return reduced, findings.loss_nonfinite


def _reduce(
    groups: GradientGroups | None,
    rows: list[list[Number]],
    plan: ReductionPlan,
    request: InspectionRequest,
    context: RankContext,
    ops: Ops,
) -> Findings:
    """Return the findings of all ranks from the headers of this one."""
    zero = 0.0 * rows[0][FOUND_INF]
    sums_squares = request.wants_norm and request.norm_type != math.inf
    uses_amax = request.wants_norm and not sums_squares
    is_sharded = request.wants_norm and bool(plan.summing)
    local_findings = Findings(
        level=_level_of(rows, ops),
        nan=_largest(rows, NAN, ops),
        amax=_largest(rows, AMAX, ops),
        loss_nonfinite=zero,
        max_norm=_largest(rows, NORM, ops) if uses_amax else zero,
        squares=_squares(groups, rows, is_sharded=is_sharded) if sums_squares else {},
    )
    level_of_norm = partial(_level_of_norm, rows[0][SCALE], request, ops)
    return _reduce_own(
        local_findings,
        plan,
        context,
        ops,
        sums_squares=sums_squares,
        level_of_norm=level_of_norm,
    )


def _reduce_own(
    local_findings: Findings,
    plan: ReductionPlan,
    context: RankContext,
    ops: Ops,
    *,
    sums_squares: bool,
    level_of_norm: "partial[Number] | None" = None,
) -> Findings:
    """Reduce the findings of this rank; raise if scales differ."""
    if context.loss_nonfinite is not None:
        (loss,) = ops.numbers(context.loss_nonfinite)
        level = ops.where(
            loss > 0.0, 0.0 * local_findings.level + OVERFLOW, local_findings.level
        )
        local_findings = local_findings._replace(level=level, loss_nonfinite=loss)
    fingerprint = consensus.fingerprint_of(context.scale, context.growth_tracker, ops)
    findings, drifted = consensus.reduce_findings(
        plan,
        local_findings,
        0.0 * local_findings.level + fingerprint,
        ops,
        wants_amax=context.wants_amax,
        sums_squares=sums_squares,
        level_of_norm=level_of_norm or (lambda norm: 0.0 * norm),
    )
    consensus.check_drift(plan, drifted, context.scale, context.growth_tracker)
    return findings


def _total(
    findings: Findings, ops: Ops, device: torch.device, *, has_norm: bool
) -> eager.Totals:
    """Return findings as the tensors that a summary is made of."""
    level, nan, amax = (
        ops.tensor(number, device)
        for number in (findings.level, findings.nan, findings.amax)
    )
    norm: torch.Tensor | None = None
    if has_norm:
        sum_of_squares = findings.squares.get(())
        norm = ops.tensor(findings.max_norm, device)
        if sum_of_squares is not None:
            norm = ops.tensor(sum_of_squares, device).sqrt()
        else:
            norm = ops.tensor(_norm_of(findings, ops), device)
    return eager.Totals(
        finite=level < OVERFLOW,
        too_large=level == TOO_LARGE_LEVEL,
        nan=nan,
        amax=amax,
        norm=norm,
    )


def _write(
    summary: GradientSummary, found_inf: FoundInf, findings: Findings, ops: Ops
) -> None:
    """Write the findings of all ranks into the summary and the flags of this one."""
    zero = 0.0 * findings.level
    numbers = summary.numbers
    numbers[FOUND_INF] = ops.where(findings.level > 0.0, zero + 1.0, zero)
    numbers[NAN] = findings.nan
    numbers[AMAX] = findings.amax
    numbers[TOO_LARGE] = ops.where(findings.level == TOO_LARGE_LEVEL, zero + 1.0, zero)
    for flag in found_inf.values():
        flag.copy_(torch.as_tensor(numbers[FOUND_INF], device=flag.device))


def _norm_of(findings: Findings, ops: Ops) -> Number:
    """Return the norm of all ranks: infinite or NaN if a gradient is not finite."""
    zero = 0.0 * findings.level
    norm = ops.where(findings.level >= OVERFLOW, zero + math.inf, findings.max_norm)
    return ops.where(findings.nan != 0.0, zero + math.nan, norm)


def _level_of(rows: list[list[Number]], ops: Ops) -> Number:
    """Return the highest level of all groups."""
    zero = 0.0 * rows[0][FOUND_INF]
    highest = zero
    for row in rows:
        level = ops.where(row[TOO_LARGE] > 0.0, zero + TOO_LARGE_LEVEL, zero + OVERFLOW)
        level = ops.where(row[FOUND_INF] > 0.0, level, zero)
        highest = ops.where(level > highest, level, highest)
    return highest


def _largest(rows: list[list[Number]], column: int, ops: Ops) -> Number:
    """Return the largest number of a column that is finite.

    Stays NOT_MEASURED if no row has a value.
    """
    largest = 0.0 * rows[0][FOUND_INF] + NOT_MEASURED
    for row in rows:
        is_larger = (row[column] > largest) & (row[column] < math.inf)
        largest = ops.where(is_larger, row[column], largest)
    return largest


def _squares(
    groups: GradientGroups | None, rows: list[list[Number]], *, is_sharded: bool
) -> dict[Sharding, Number]:
    """Return the sums of squares by the sharding of the gradients."""
    shardings: list[Sharding] = [()] * len(rows)
    if is_sharded and groups is not None:
        shardings = [group.sharding for group in groups.groups]
    squares: dict[Sharding, Number] = {}
    for sharding, row in zip(shardings, rows, strict=True):
        squares[sharding] = squares.get(sharding, 0.0) + row[NORM] * row[NORM]
    return squares


def _level_of_norm(
    scale: Number, request: InspectionRequest, ops: Ops, norm: Number
) -> Number:
    """Return the level that a norm implies, as in `eager`: 0 if it can be clipped.

    Ranks outside of those over which it was added up have to know it too.
    """
    zero = 0.0 * scale
    if request.max_norm == math.inf:
        return zero
    level = zero
    if request.as_grad_scale:
        fits = scale * (norm + EPSILON) <= FLOAT32_MAX * request.max_norm
        level = ops.where(fits, zero, zero + OVERFLOW)
    return ops.where(norm <= FLOAT32_MAX, level, zero + TOO_LARGE_LEVEL)


def _empty_buffer(gradient_scale: GradientScale) -> torch.Tensor:
    """Return the buffer of a summary of no gradients at all."""
    scale, inverse = gradient_scale.scale_and_inverse()
    unit = torch.ones_like(scale)
    zero = 0 * unit
    return torch.stack([zero] * 4 + [scale, inverse, scale, unit, zero, -unit])
