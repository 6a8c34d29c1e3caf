# SPDX-License-Identifier: Apache-2.0
"""`AutoStart`: find the first scale on the first batch, then follow a rule."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from lossscale.core import validation
from lossscale.core.data_policies.octaves import round_up_to_power
from lossscale.core.data_policies.rule_based import RuleBased, observe_magnitude
from lossscale.core.measurements import Measurement
from lossscale.core.state import Array, Signal, State, Where
from lossscale.errors import SettingError


class AutoStartState(NamedTuple):
    """A `ScaleState`, and how far the search for the first scale has come."""

    scale: Array
    good_steps: Array
    bad_steps: Array
    overflowed: Array
    """The lowest scale that has overflowed, `init_scale` if none has; 0.0 once the
    scale has been found."""


class _Prepared:
    """Computed once; no setting, so no field of the dataclass."""

    _jump: int
    """Doublings of each jump."""


@dataclass(frozen=True, kw_only=True)
class AutoStart(RuleBased, _Prepared):
    """A dynamic scale whose start is found on the first batch instead of guessed.

    ::

        until the first finite step with a gradient:
        overflow: scale' = scale / 2**jump          at most `tries` times
        finite:   fits   = largest * 2**-margin / (|largest gradient| / scale)
                  scale' = init_scale / 2**k <= fits, the smallest such k >= 0

    Then `rule` decides alone. The jumps reach 1 with the last try, from any
    `init_scale`: a step that overflows at 65,536 is followed by attempts at 4,096, 256,
    16 and 1 instead of up to sixteen halvings, one that overflows at 2**32 by attempts
    at 2**24, 2**16, 2**8 and 1. Where a framework can compute the same batch again, no
    batch is lost; elsewhere each attempt costs one.

    Jumps of one size, and not growing ones: where an overflow inside the network is not
    explained by the gradients, the scale stays where a jump has led, and a large last
    jump would leave it far too low.

    The scale found is never above `init_scale`. It is raised from a lower attempt only
    if the measured gradients explain the overflow above it, that is if they would not
    have fitted the format at that scale. If they would, something inside the network
    overflowed, and the scale stays where it was finite. If all tries overflow, the
    batch itself is to blame: `rule` decides about that step, and the next finite batch
    chooses the scale up to `init_scale`.

    The formula is Fast-LLM's start-up calibration, 2**floor(log2(65504 / (h * a))),
    with the overflow as the way to get at a first measurement. Without a measured
    `amax` the first finite step ends the search at its own scale. Steps whose gradients
    are all zero do not end it. `rule.hysteresis` is not used before the start.

    Example:
        >>> from lossscale import AutoStart, Signal
        >>> policy = AutoStart()
        >>> choose = lambda condition, a, b: a if condition else b
        >>> state = policy.step(policy.init(), Signal(finite=False), where=choose)
        >>> state.scale
        4096.0
        >>> signal = Signal(finite=True, amax=20000.0)  # 320,000 at 65,536
        >>> policy.step(state, signal, where=choose).scale
        1024.0
    """

    margin: float = 3.0
    """Doublings between the largest first gradient and the maximum of the format."""

    jump: int | None = None
    """Doublings by which an overflow lowers the scale before the start. By default as
    many as lead from `init_scale` to 1 in `tries` jumps, and at least 4."""

    tries: int = 4
    """How many times it is lowered by so much, before `rule` decides."""

    largest: float = 65504.0
    """The maximum of the format in which gradients are computed; float16's."""

    def __post_init__(self) -> None:
        """Check every setting, and keep it as a plain Python number."""
        super().__post_init__()
        checked: dict[str, Any] = {
            "margin": validation.check_between("margin", self.margin, 0, 32),
            "tries": validation.check_count("tries", self.tries, "tries"),
            "largest": validation.check_scale("largest", self.largest),
        }
        if self.jump is None:
            to_one = math.log2(self.rule.init_scale) / checked["tries"]
            jump = max(_LEAST_JUMP, math.ceil(to_one))
        else:
            jump = checked["jump"] = validation.check_count(
                "jump", self.jump, "doublings"
            )
        if jump * checked["tries"] > _MOST_DOUBLINGS:
            message = (
                f"jump * tries must be at most {_MOST_DOUBLINGS} doublings, got "
                f"{jump} * {checked['tries']}."
            )
            raise SettingError(message)
        for name, value in {**checked, "_jump": jump}.items():
            object.__setattr__(self, name, value)

    @property
    def wants(self) -> tuple[Measurement, ...]:
        """The measurements that the policy reads besides the flags."""
        return ("amax",)

    def init(self) -> State:
        """Return the first state: no scale has overflowed."""
        return AutoStartState(*self.rule.init(), self.rule.init_scale)

    def is_starting(self, state: State) -> Array:
        """Return whether the first scale is still being searched.

        Example:
            >>> from lossscale import AutoStart
            >>> policy = AutoStart()
            >>> policy.is_starting(policy.init())
            True
        """
        return state.overflowed > 0.0

    def step(self, state: State, signal: Signal, *, where: Where) -> State:
        """Return the state after a step."""
        ruled = self.follow_rule(state, signal, where)
        starting = self.is_starting(state)
        new_scale, is_found = self._find(state, ruled, signal, where)
        down = state.scale * 2.0**-self._jump
        jumped = where(down >= self._lowest(), down, ruled.scale)
        searched = where(signal.finite, new_scale, jumped)
        overflowed = where(
            signal.finite, where(is_found, 0.0, state.overflowed), state.scale
        )
        after = AutoStartState(
            where(starting, searched, ruled.scale),
            ruled.good_steps,
            # The tries are no overflows that a hysteresis counts.
            where(starting, 0, ruled.bad_steps),
            where(starting, overflowed, 0.0),
        )
        return self.keep_if_loss_nonfinite(state, after, signal, where)

    def _find(
        self, state: State, ruled: State, signal: Signal, where: Where
    ) -> tuple[Array, Array]:
        """Return the scale after a finite step of the search, and whether it ends."""
        scale = state.scale
        if signal.amax is None:
            return ruled.scale, scale > 0.0
        magnitude = observe_magnitude(signal, scale, 0.0, where)
        limit = validation.as_float32(self.largest * 2.0**-self.margin)
        first = validation.as_float32(self.rule.init_scale)
        # Times a reciprocal: compilers replace a division by a constant themselves.
        use = magnitude * first * validation.as_float32(1.0 / limit)
        use = where(use >= 1.0, where(use <= 2.0**126, use, 2.0**126), 1.0)
        fits = first / round_up_to_power(use, where)
        lowest = self.rule.settings.min_scale
        fits = where(fits >= lowest, fits, lowest)
        largest = validation.as_float32(self.largest)
        is_explained = magnitude * state.overflowed > largest
        is_exhausted = state.overflowed * 2.0**-self._jump < self._lowest()
        raised = where(is_explained, fits, where(is_exhausted, fits, scale))
        new_scale = where(fits <= scale, fits, raised)
        return where(magnitude > 0.0, new_scale, ruled.scale), magnitude > 0.0

    def _lowest(self) -> float:
        """Return the scale below which no jump leads."""
        lowest = self.rule.init_scale * 2.0 ** -(self._jump * self.tries)
        return validation.as_float32(max(lowest, self.rule.min_scale))


_LEAST_JUMP = 4

_MOST_DOUBLINGS = 252
"""From the highest scale to the lowest."""
