# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that updates the scale: `core/rule.py`, compiled by Triton."""

# Triton parses this function: it has no types.
# ruff: noqa: ANN001, ANN201, ANN202
import triton
import triton.language as tl

from lossscale.core.rule import transition
from lossscale.torch.inspection.summary import LOSS

# The interpreter runs kernels as Python and can call the rule as it is. It expects
# `triton.language` in the globals of decorated functions, and the rule imports nothing.
_rule = transition if triton.knobs.runtime.interpret else triton.jit(transition)

_LOSS = tl.constexpr(LOSS)
_LANES = tl.constexpr(1024)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _select(condition, first, second):
    """Call `tl.where`, which Triton 3.6 does not pass on as an argument itself."""
    return tl.where(condition, first, second)


@triton.jit
def note_loss(loss_pointer, summary):
    """Note in a summary whether a loss, float32, is not finite."""
    loss = tl.abs(tl.load(loss_pointer))
    tl.store(summary + _LOSS, tl.where(loss <= _FLOAT32_MAX, 0.0, 1.0))


@triton.jit
def count_step(counters, skipped):
    """Count a step: all, skipped ones, consecutive skipped ones."""
    increment = tl.where(skipped, 1, 0)
    tl.store(counters, tl.load(counters) + 1)
    tl.store(counters + 1, tl.load(counters + 1) + increment)
    tl.store(counters + 2, tl.where(skipped, tl.load(counters + 2) + 1, 0))


@triton.jit
def copy_numbers(source, target, length):
    """Copy float32 numbers, of which this program may have written some."""
    tl.debug_barrier()
    lane = tl.arange(0, _LANES)
    for start in range(0, length, _LANES):
        mask = start + lane < length
        numbers = tl.load(source + start + lane, mask=mask, other=0.0)
        tl.store(target + start + lane, numbers, mask=mask)


# Triton would compile the kernel for a length that is a multiple of 16.
@triton.jit(do_not_specialize=["length"])
def update_scale(
    scale_pointer,
    good_pointer,
    bad_pointer,
    counters,
    flags,
    held_by_loss_pointer,
    loss_pointer,
    summary,
    copy,
    length,
    settings,
    growth_threshold,
    good_after_growth,
    hysteresis,
    skipped_at: tl.constexpr,
    too_large_at: tl.constexpr,
    multiplies_in_float64: tl.constexpr,
    may_be_held_by_loss: tl.constexpr,
    notes_loss: tl.constexpr,
    copies: tl.constexpr,
    moves: tl.constexpr,
    backoff_divides: tl.constexpr,
    hold_at_min: tl.constexpr,
    clamp_at_max: tl.constexpr,
    finite_clears_bad: tl.constexpr,
    backoff_clears_bad: tl.constexpr,
):
    """Advance the scaler's state by one step, in place.

    Args:
        scale_pointer: The scale, float32.
        good_pointer: Finite steps counted towards the next growth, int32.
        bad_pointer: Overflows counted towards the next back-off, int32.
        counters: Steps, skipped steps and consecutive skipped steps, int32.
        flags: 1 or 0, float32. The first says whether a gradient was not finite.
        held_by_loss_pointer: 1 if a non-finite loss holds the scale; read only if
            `may_be_held_by_loss`.
        loss_pointer: The loss before it was scaled, float32; read only if `notes_loss`.
        summary: Output: 1 if that loss is not finite, else 0, where a summary has it.
        copy: Output: the whole summary, in pinned memory of the host; written only if
            `copies`.
        length: How many numbers the summary has.
        settings: The rule's growth factor, back-off, floor and cap, float64.
        growth_threshold: An argument of the rule.
        good_after_growth: An argument of the rule.
        hysteresis: An argument of the rule.
        skipped_at: Which flag says whether the step was skipped.
        too_large_at: Which flag says whether finite gradients were too large, which
            holds the scale.
        multiplies_in_float64: Multiply in float64 and round once, as torch does.
        may_be_held_by_loss: Whether the policy holds the scale on a non-finite loss.
        notes_loss: Whether to check the loss for the report.
        copies: Whether to copy the summary to the host.
        moves: Whether the policy moves the scale at all.
        backoff_divides: A switch of the rule.
        hold_at_min: A switch of the rule.
        clamp_at_max: A switch of the rule.
        finite_clears_bad: A switch of the rule.
        backoff_clears_bad: A switch of the rule.
    """
    found_inf = tl.load(flags) != 0.0
    skipped = tl.load(flags + skipped_at) != 0.0
    held = tl.load(flags + too_large_at) != 0.0
    if may_be_held_by_loss:
        held = held | (tl.load(held_by_loss_pointer) != 0.0)
    if moves:
        old_scale = tl.load(scale_pointer)
        old_good = tl.load(good_pointer)
        old_bad = tl.load(bad_pointer)
        growth_factor = tl.load(settings)
        backoff = tl.load(settings + 1)
        min_scale = tl.load(settings + 2)
        max_scale = tl.load(settings + 3)
        scale = old_scale.to(tl.float64)
        if not multiplies_in_float64:
            scale = old_scale
            growth_factor = growth_factor.to(tl.float32)
            min_scale = min_scale.to(tl.float32)
            max_scale = max_scale.to(tl.float32)
            if not backoff_divides:
                # A quotient is computed in float64 and rounded, which is exact: in
                # float32 Triton's `/` is an approximation.
                backoff = backoff.to(tl.float32)
        scale, good, bad = _rule(
            scale,
            old_good,
            old_bad,
            found_inf == 0,
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
        tl.store(scale_pointer, tl.where(held, old_scale, scale.to(tl.float32)))
        tl.store(good_pointer, tl.where(held, old_good, good))
        tl.store(bad_pointer, tl.where(held, old_bad, bad))
    if notes_loss:
        note_loss(loss_pointer, summary)
    count_step(counters, skipped)
    if copies:
        copy_numbers(summary, copy, length)
