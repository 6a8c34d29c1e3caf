# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of a few numbers: what the gradients' chunks add up to, and the rule.

`decide` makes one verdict of what `read` wrote, in the layout of `verdict.py`; `update`
runs `core/rule.py` itself, compiled by Triton, on the state of the scaler.
"""

# Triton parses these functions and knows no types.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0915, SIM108
import triton
import triton.language as tl

from lossscale.core.rule import transition
from lossscale.torch.kernels.gradients import inverse_of

# The interpreter runs kernels as Python and can call the rule as it stands; of what is
# decorated it wants `triton.language` in the globals, and the rule imports nothing.
_rule = transition if triton.knobs.runtime.interpret else triton.jit(transition)

_LANES = tl.constexpr(1024)
_HEADER = tl.constexpr(10)
_NOT_MEASURED = tl.constexpr(-1.0)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _select(condition, first, second):
    """Call `tl.where`, which Triton 3.6 does not hand on as an argument itself."""
    return tl.where(condition, first, second)


@triton.jit
def _top(first, second):
    """Return the larger of two magnitudes; NaN is above all."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def decide(
    starts,
    limits,
    bounds,
    sums,
    tops,
    tensor_sums,
    tensor_tops,
    scale_pointer,
    verdict,
    finished,
    tensors,
    max_norm,
    euclid: tl.constexpr,
    clips: tl.constexpr,
    checks_headroom: tl.constexpr,
    in_optimizer: tl.constexpr,
    inverted: tl.constexpr,
):
    """Reduce the chunks of one tensor; the last program to do so decides.

    Args:
        starts: The first chunk of each tensor, and one past the last, int32.
        limits: What each tensor's numbers may be once unscaled, float64.
        bounds: What the optimizer can hold of them; see `headroom.py`, float64.
        sums: The chunks' sums of squares, float64.
        tops: The chunks' largest magnitudes, float64.
        tensor_sums: Room for one float64 per tensor.
        tensor_tops: The same.
        scale_pointer: The scale, or its inverse if `inverted`.
        verdict: What is decided, float32; see `verdict.py`.
        finished: A counter that is 0, and is 0 again afterwards, int32.
        tensors: How many tensors there are.
        max_norm: What to clip to; infinite for no clipping.
        euclid: Whether the norm is Euclid's; otherwise it is the largest magnitude.
        clips: Whether `max_norm` is to be looked at.
        checks_headroom: Whether `bounds` are.
        in_optimizer: Whether the optimizer divides by what comes out.
        inverted: Whether `scale_pointer` holds the inverse.
    """
    tensor = tl.program_id(0)
    inverse = inverse_of(tl.load(scale_pointer), inverted).to(tl.float64)
    lane = tl.arange(0, _LANES)
    first = tl.load(starts + tensor)
    end = tl.load(starts + tensor + 1)
    sum_lanes = tl.zeros([_LANES], tl.float64)
    top_lanes = tl.zeros([_LANES], tl.float64)
    for at in range(first, end, _LANES):
        there = at + lane < end
        sum_lanes += tl.load(sums + at + lane, mask=there, other=0.0)
        top_lanes = _top(top_lanes, tl.load(tops + at + lane, mask=there, other=0.0))
    total = tl.sum(sum_lanes)
    top = tl.reduce(top_lanes, 0, _top)
    # Too large once it is divided by a scale below 1, or a scale that is of no use.
    usable = (top * inverse <= tl.load(limits + tensor)) & (inverse > 0.0)
    top = tl.where(usable | (top != top), top, float("inf"))  # noqa: PLR0124
    tl.store(tensor_sums + tensor, total)
    tl.store(tensor_tops + tensor, top)
    # A finite float64 beyond float32 is no infinity.
    shown = tl.where((top > _FLOAT32_MAX) & (top < float("inf")), _FLOAT32_MAX, top)
    tl.store(verdict + _HEADER + tensor, shown.to(tl.float32))
    tl.debug_barrier()
    before = tl.atomic_add(finished, 1, sem="acq_rel")
    if before == tensors - 1:
        sum_lanes = tl.zeros([_LANES], tl.float64)
        top_lanes = tl.zeros([_LANES], tl.float64)
        finite_lanes = tl.zeros([_LANES], tl.float64)
        excess_lanes = tl.zeros([_LANES], tl.float64)
        for at in range(0, tensors, _LANES):
            there = at + lane < tensors
            # Other programs wrote them: not what this one's cache may hold.
            some = tl.load(
                tensor_sums + at + lane, mask=there, other=0.0, cache_modifier=".cg"
            )
            those = tl.load(
                tensor_tops + at + lane, mask=there, other=0.0, cache_modifier=".cg"
            )
            sum_lanes += some
            top_lanes = _top(top_lanes, those)
            finite_lanes = tl.maximum(
                finite_lanes, tl.where(those < float("inf"), those, 0.0)
            )
            if checks_headroom:
                bound = tl.load(bounds + at + lane, mask=there, other=1.0)
                excess_lanes = tl.maximum(
                    excess_lanes, tl.where(those * inverse > bound, 1.0, 0.0)
                )
        total = tl.sum(sum_lanes)
        top = tl.reduce(top_lanes, 0, _top)
        amax = tl.max(finite_lanes)
        scale = tl.load(scale_pointer).to(tl.float64)
        if inverted:
            scale = 1.0 / scale
        if euclid:
            norm = tl.sqrt(total) / scale
        else:
            norm = top / scale
        finite = top < float("inf")
        too_large = tl.max(excess_lanes) > 0.0
        clip = scale * 0.0 + 1.0
        if clips:
            clip = max_norm / (norm + 1e-6)
            clip = tl.where(clip < 1.0, clip, 1.0)
        divisor = (scale / clip).to(tl.float32)
        factor = (clip * inverse).to(tl.float32)
        if clips:
            # A norm beyond float32 would clip everything to zero, or to NaN.
            too_large = too_large | (norm > _FLOAT32_MAX)
        too_large = finite & too_large
        if in_optimizer:
            finite = finite & (too_large | (divisor <= _FLOAT32_MAX))
        tl.store(verdict, tl.where(finite & (too_large == 0), 0.0, 1.0))
        tl.store(verdict + 1, tl.where(top == top, 0.0, 1.0))  # noqa: PLR0124
        tl.store(verdict + 2, tl.minimum(amax, _FLOAT32_MAX).to(tl.float32))
        tl.store(verdict + 3, norm.to(tl.float32))
        tl.store(verdict + 4, divisor)
        tl.store(verdict + 5, factor)
        tl.store(verdict + 6, scale.to(tl.float32))
        tl.store(verdict + 7, clip.to(tl.float32))
        tl.store(verdict + 8, tl.where(too_large, 1.0, 0.0))
        tl.store(verdict + 9, _NOT_MEASURED)
        tl.store(finished, 0)


@triton.jit
def update(
    scale_pointer,
    good_pointer,
    bad_pointer,
    counters,
    found_pointer,
    skipped_pointer,
    held_pointer,
    loss_pointer,
    raw_loss_pointer,
    loss_seen_pointer,
    settings,
    growth_threshold,
    good_after_growth,
    hysteresis,
    wide: tl.constexpr,
    check_loss: tl.constexpr,
    note_loss: tl.constexpr,
    moves: tl.constexpr,
    backoff_divides: tl.constexpr,
    hold_at_min: tl.constexpr,
    clamp_at_max: tl.constexpr,
    finite_clears_bad: tl.constexpr,
    backoff_clears_bad: tl.constexpr,
):
    """Take one step of the scaler's state, in place.

    Args:
        scale_pointer: The scale, float32.
        good_pointer: Clean steps counted towards the next growth, int32.
        bad_pointer: Overflows counted towards the next back-off, int32.
        counters: Steps, skipped steps and skipped steps in a row, int32.
        found_pointer: 1 if a gradient was not finite, else 0, float32.
        skipped_pointer: 1 if the step was skipped, else 0, float32.
        held_pointer: 1 if finite gradients were too large, which leaves the scale.
        loss_pointer: 1 if the loss was not finite; read only if `check_loss`.
        raw_loss_pointer: The loss before it was scaled; read only if `note_loss`.
        loss_seen_pointer: Where 1 goes if it was not finite, else 0.
        settings: The rule's growth factor, back-off, floor and cap, float64.
        growth_threshold: As the rule has it.
        good_after_growth: As the rule has it.
        hysteresis: As the rule has it.
        wide: Multiply in float64 and round once, as torch does.
        check_loss: A loss that was not finite leaves the scale as it is.
        note_loss: Whether to look at the loss for the report.
        moves: Whether the policy moves the scale at all.
        backoff_divides: As the rule has it.
        hold_at_min: As the rule has it.
        clamp_at_max: As the rule has it.
        finite_clears_bad: As the rule has it.
        backoff_clears_bad: As the rule has it.
    """
    found = tl.load(found_pointer) != 0.0
    skipped = tl.load(skipped_pointer) != 0.0
    hold = tl.load(held_pointer) != 0.0
    if check_loss:
        hold = hold | (tl.load(loss_pointer) != 0.0)
    if moves:
        old_scale = tl.load(scale_pointer)
        old_good = tl.load(good_pointer)
        old_bad = tl.load(bad_pointer)
        growth_factor = tl.load(settings)
        backoff = tl.load(settings + 1)
        min_scale = tl.load(settings + 2)
        max_scale = tl.load(settings + 3)
        scale = old_scale.to(tl.float64)
        if not wide:
            scale = old_scale
            growth_factor = growth_factor.to(tl.float32)
            min_scale = min_scale.to(tl.float32)
            max_scale = max_scale.to(tl.float32)
            if not backoff_divides:
                # A quotient is taken in float64 and rounded, which is exact: in
                # float32 Triton's `/` is an approximation.
                backoff = backoff.to(tl.float32)
        scale, good, bad = _rule(
            scale,
            old_good,
            old_bad,
            found == 0,
            growth_factor,
            growth_threshold,
            good_after_growth,
            backoff,
            hysteresis,
            min_scale,
            max_scale,
            backoff_divides,
            hold_at_min,
            clamp_at_max,
            finite_clears_bad,
            backoff_clears_bad,
            _select,
        )
        scale = scale.to(tl.float32)
        scale = tl.where(hold, old_scale, scale)
        good = tl.where(hold, old_good, good)
        bad = tl.where(hold, old_bad, bad)
        tl.store(scale_pointer, scale)
        tl.store(good_pointer, good)
        tl.store(bad_pointer, bad)
    if note_loss:
        raw = tl.abs(tl.load(raw_loss_pointer))
        tl.store(loss_seen_pointer, tl.where(raw <= _FLOAT32_MAX, 0.0, 1.0))
    one = tl.where(skipped, 1, 0)
    tl.store(counters, tl.load(counters) + 1)
    tl.store(counters + 1, tl.load(counters + 1) + one)
    tl.store(counters + 2, tl.where(skipped, tl.load(counters + 2) + 1, 0))
