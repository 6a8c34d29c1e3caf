# SPDX-License-Identifier: Apache-2.0
"""The transition: what one training step does to a loss scale.

Every scaler in the field is one small state machine. This file is that machine,
and the only place in the package where it is written down. Read it first.

The state is three numbers: `scale`; `good` (`ScaleState.good_steps`), the finite steps
counted towards the next growth; and `bad` (`bad_steps`), the overflows counted towards
the next back-off. A step reports one thing, `finite`: were all gradients finite? Then:

    a finite step      good + 1.  Once good reaches `growth_threshold`:
                       scale * growth_factor, unless that passes `max_scale`.
    an overflow        good = 0, bad + 1.  Once bad reaches `hysteresis`:
                       scale * backoff (or scale / backoff), not below `min_scale`.

Reaching a threshold clears the counter even where a bound kept the scale in place.

One source serves NumPy, torch, JAX, TensorFlow, `keras.ops` and, compiled by
`triton.jit`, a GPU kernel. Therefore the function

- has operators and `where(condition, a, b)` alone: the one function that all of them
  share;
- never branches on a value. `if` appears on switches only, which are plain Python
  booleans (constants to Triton), so each policy compiles to straight-line code;
- compares with a finite `max_scale` instead of asking `isfinite`: infinity and NaN
  fail the comparison;
- takes positional parameters, quotes its annotations and returns once, because
  Triton parses this text.

It is elementwise: a vector of scales, or of settings, is the same code. Arithmetic
happens in the dtype of `scale`, which is float32 everywhere (plain Python floats
are float64: their results differ in the last bits for factors such as 1.7).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lossscale.core.state import Array, Where


def transition(
    # the state before the step, and what the step saw
    scale: "Array",
    good: "Array",
    bad: "Array",
    finite: "Array",
    # settings: numbers, or arrays of them
    growth_factor: "float",
    growth_threshold: "int",
    good_after_growth: "int",
    backoff: "float",
    hysteresis: "int",
    min_scale: "float",
    max_scale: "float",
    # switches: Python booleans
    backoff_divides: "bool",
    hold_at_min: "bool",
    clamp_at_max: "bool",
    finite_clears_bad: "bool",
    backoff_clears_bad: "bool",
    # the framework's select
    where: "Where",
) -> "tuple[Array, Array, Array]":
    """Return `(scale, good, bad)` after one step.

    Args:
        scale: Current scale, float32.
        good: Finite steps counted towards the next growth, an integer.
        bad: Overflows counted towards the next back-off, an integer.
        finite: Whether every gradient of this step was finite, a boolean.
        growth_factor: What growth multiplies by, above 1.
        growth_threshold: The value of `good` at which the scale grows: the growth
            interval, or one more where growth comes a step late (flax, DeepSpeed).
        good_after_growth: Where `good` starts again after a growth: 0, or 1 where
            only the first growth after an overflow comes a step late (DeepSpeed).
        backoff: What back-off multiplies by (below 1) or divides by (above 1).
        hysteresis: The value of `bad` at which the scale backs off.
        min_scale: No back-off goes below it.
        max_scale: No growth goes above it; finite.
        backoff_divides: Divide by `backoff` instead of multiplying.
        hold_at_min: Refuse a move that would end below `min_scale`, instead of
            going to `min_scale` exactly.
        clamp_at_max: Go to `max_scale` exactly, instead of refusing the growth.
        finite_clears_bad: A finite step clears `bad`: only consecutive overflows
            add up.
        backoff_clears_bad: A back-off clears `bad`. If it does not, every further
            overflow backs off again until `bad` is cleared.
        where: The framework's select, `where(condition, a, b)`.

    Example:
        >>> import numpy as np
        >>> from lossscale.core.rule import transition
        >>> factors = {"growth_factor": 2.0, "backoff": 0.5}
        >>> counts = {"growth_threshold": 2, "good_after_growth": 0, "hysteresis": 1}
        >>> bounds = {"min_scale": 1.0, "max_scale": 65536.0}
        >>> names = "backoff_divides", "hold_at_min", "clamp_at_max"
        >>> switches = dict.fromkeys((*names, "finite_clears_bad"), False)
        >>> settings = {**factors, **counts, **bounds, **switches}
        >>> state = (8.0, 1, 0)
        >>> found = transition(
        ...     *state, True, **settings, backoff_clears_bad=True, where=np.where
        ... )
        >>> [float(number) for number in found]
        [16.0, 0.0, 0.0]
    """
    # Count this step.
    good = where(finite, good + 1, 0)
    if finite_clears_bad:
        bad = where(finite, 0, bad + 1)
    else:
        bad = where(finite, bad, bad + 1)

    # An overflow has just set good to 0 and the threshold is at least 1, so growth
    # does not depend on `finite`. A back-off does: bad may wait at its threshold.
    grow = good >= growth_threshold
    # `bad < 0` is a False of the right kind in every framework.
    shrink = where(finite, bad < 0, bad >= hysteresis)

    # Where the scale would go.
    up = scale * growth_factor
    if backoff_divides:
        # XLA and Grappler turn a division by a constant into a product with its rounded
        # reciprocal. This divisor is no constant to them: they do not know that no
        # scale is below 0.
        down = scale / where(scale < 0, scale, backoff)
    else:
        down = scale * backoff

    # The bounds. No step leads beyond them; a checkpoint of another library may have
    # brought a scale that is there, infinite or NaN, and an overflow brings it back.
    down = where(down <= max_scale, down, max_scale)
    if clamp_at_max:
        up = where(up <= max_scale, up, max_scale)
    else:
        up = where(up <= max_scale, up, scale)
    if hold_at_min:
        # The classic manager may start below its floor; it refuses any such result.
        up = where(up >= min_scale, up, scale)
        down = where(down >= min_scale, down, scale)
    else:
        down = where(down >= min_scale, down, min_scale)

    # Move, and start the counters again.
    scale = where(grow, up, where(shrink, down, scale))
    good = where(grow, good_after_growth, good)
    bad = where(grow, 0, bad)
    if backoff_clears_bad:
        bad = where(shrink, 0, bad)
    return scale, good, bad
