"""A Triton kernel around core/rule.py, for the tests; nothing of the rule is copied.

Imported by the tests in a process that has no TensorFlow: the two abort together.
"""

import triton
import triton.language as tl

from lossscale.core.rule import transition

# The interpreter runs kernels as Python and can call the rule as it is; of what is
# decorated it wants `triton.language` in the globals, and the rule imports nothing.
rule = transition if triton.knobs.runtime.interpret else triton.jit(transition)


@triton.jit
def select(condition, first, second):
    """Call `tl.where`, which Triton 3.6 does not hand on as an argument itself."""
    return tl.where(condition, first, second)


@triton.jit
def rule_kernel(
    scale_pointer,
    good_pointer,
    bad_pointer,
    finite_pointer,
    growth_factor,
    growth_threshold,
    good_after_growth,
    backoff,
    hysteresis,
    min_scale,
    max_scale,
    count,
    backoff_divides: tl.constexpr,
    hold_at_min: tl.constexpr,
    clamp_at_max: tl.constexpr,
    finite_clears_bad: tl.constexpr,
    backoff_clears_bad: tl.constexpr,
    exact_division: tl.constexpr,
    block: tl.constexpr,
):
    """Take one step of a row of states, in place."""
    place = tl.arange(0, block)
    there = place < count
    scale = tl.load(scale_pointer + place, mask=there, other=1.0)
    good = tl.load(good_pointer + place, mask=there, other=0)
    bad = tl.load(bad_pointer + place, mask=there, other=0)
    finite = tl.load(finite_pointer + place, mask=there, other=1) != 0
    if exact_division:
        # In float32 Triton's `/` is an approximation. A float64 quotient of two float32
        # numbers, rounded when it is stored, is the float32 quotient.
        backoff = backoff.to(tl.float64)
    scale, good, bad = rule(
        scale,
        good,
        bad,
        finite,
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
        select,
    )
    tl.store(scale_pointer + place, scale, mask=there)
    tl.store(good_pointer + place, good, mask=there)
    tl.store(bad_pointer + place, bad, mask=there)
