# SPDX-License-Identifier: Apache-2.0
"""`LogMax`: the scale from the mean and the spread of the largest magnitudes."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from lossscale.core import validation
from lossscale.core.data_policies.octaves import exp2_floor, log2, square_root
from lossscale.core.data_policies.rule_based import (
    NEVER,
    RuleBased,
    observe_magnitude,
)
from lossscale.core.measurements import Measurement
from lossscale.core.state import Array, Signal, State, Where


class LogMaxState(NamedTuple):
    """A `ScaleState` and the moments of log2 magnitudes."""

    scale: Array
    good_steps: Array
    bad_steps: Array
    mean: Array
    """The mean of the last `window` logarithms."""
    slow_mean: Array
    """The mean of ten times as many."""
    variance: Array
    """Their variance."""
    seen: Array
    """How many there were, up to ten windows."""


@dataclass(frozen=True, kw_only=True)
class LogMax(RuleBased):
    """The scale at which all but one largest magnitude in a thousand fit the format.

    ::

        x      = log2(|largest gradient| / scale)
        mean   = the average of x over about `window` steps
        spread = its standard deviation over about ten times as many
        scale' = 2**floor(log2(largest) - (mean + deviations * spread))

    The source is OpenSeq2Seq (Kuchaiev et al., 2018, arXiv 1805.10387). There an
    overflow enters as x = 2**16, where log2(2**16) = 16 was meant: one overflow moves
    the mean by hundreds of octaves, and the scale falls to its minimum for hundreds of
    steps. Here an overflow is a censored observation: the magnitude did not fit, so
    x = log2(largest / scale) + 1. NaN counts as an overflow: infinities that meet give
    NaN. Steps without a gradient above zero are not counted.

    Averages start as plain means and become exponential ones after their window; the
    spread starts at one octave. The scale is a power of two. It falls as far as the
    formula says, rises by at most one doubling per step, and not before `patience`
    finite steps in a row: gradients inside a network may overflow where those of its
    weights fit, and the scale then must not return at once.

    Without a measured `amax`, `rule` decides alone.

    Example:
        >>> from lossscale import LogMax, Signal
        >>> policy = LogMax()
        >>> signal = Signal(finite=True, amax=60000.0)
        >>> choose = lambda condition, a, b: a if condition else b
        >>> policy.step(policy.init(), signal, where=choose).scale
        8192.0
    """

    deviations: float = 3.09
    """Standard deviations above the mean that must fit: 3.09 is the 99.9 % quantile of
    a normal distribution."""

    window: int = 100
    """Steps over which the mean is taken; the spread over ten times as many."""

    patience: int = 20
    """Finite steps in a row before the scale may rise."""

    largest: float = 65504.0
    """The maximum of the format in which gradients are computed; float16's."""

    def __post_init__(self) -> None:
        """Check every setting, and keep it as a plain Python number."""
        super().__post_init__()
        checked = {
            "deviations": validation.check_between(
                "deviations", self.deviations, 0, 32
            ),
            "window": validation.check_window("window", self.window),
            "patience": validation.check_count("patience", self.patience),
            "largest": validation.check_scale("largest", self.largest),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def wants(self) -> tuple[Measurement, ...]:
        """The measurements that the policy reads besides the flags."""
        return ("amax",)

    def init(self) -> State:
        """Return the first state: nothing seen, a spread of one octave."""
        return LogMaxState(*self.rule.init(), 0.0, 0.0, 1.0, 0.0)

    def step(self, state: State, signal: Signal, *, where: Where) -> State:
        """Return the state after a step."""
        ruled = self.follow_rule(state, signal, where, growth_threshold=NEVER)
        if signal.amax is None:
            ruled = self.follow_rule(state, signal, where)
            after = state._replace(**ruled._asdict())
            return self.keep_if_loss_nonfinite(state, after, signal, where)
        beyond = 2.0 * self.largest / state.scale
        magnitude = observe_magnitude(signal, state.scale, beyond, where)
        mean, slow_mean, variance, count = self._observe(state, magnitude, where)
        spread = square_root(variance, where) * self.deviations
        spread = where(spread >= 0.0, spread, 0.0)
        target = exp2_floor(math.log2(self.largest) - (mean + spread), where)
        target = where(count > 0.0, target, state.scale)
        after = LogMaxState(
            self._move(state, ruled, target, signal, where),
            ruled.good_steps,
            ruled.bad_steps,
            mean,
            slow_mean,
            variance,
            count,
        )
        return self.keep_if_loss_nonfinite(state, after, signal, where)

    def _observe(
        self, state: State, magnitude: Array, where: Where
    ) -> tuple[Array, Array, Array, Array]:
        """Return the moments with one more magnitude; as they are if it is 0."""
        x = log2(where(magnitude > 0.0, magnitude, 1.0), where)
        slow_window = 10.0 * self.window
        count = state.seen + 1.0
        count = where(count <= slow_window, count, slow_window)
        weight = where(count <= self.window, count, float(self.window))
        mean = state.mean + (x - state.mean) / weight
        slow_mean = state.slow_mean + (x - state.slow_mean) / count
        square = (x - state.slow_mean) * (x - slow_mean)
        square = where(square >= 0.0, square, 0.0)
        variance = state.variance + (square - state.variance) / (count + 1.0)
        new_values = mean, slow_mean, variance, count
        return tuple(
            where(magnitude > 0.0, new_value, old_value)
            for new_value, old_value in zip(new_values, state[3:], strict=True)
        )

    def _move(
        self, state: State, ruled: State, target: Array, signal: Signal, where: Where
    ) -> Array:
        """Return the scale after a step: towards the one that is wanted."""
        scale, settings = state.scale, self.rule.settings
        target = where(target >= settings.min_scale, target, settings.min_scale)
        raised = self.raise_scale(scale, 2.0, where)
        raised = where(ruled.good_steps >= self.patience, raised, scale)
        moved = where(
            target < scale, target, where(target >= scale * 2.0, raised, scale)
        )
        lower = where(target < ruled.scale, target, ruled.scale)
        return where(signal.finite, moved, lower)
