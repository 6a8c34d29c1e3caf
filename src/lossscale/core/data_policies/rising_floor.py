# SPDX-License-Identifier: Apache-2.0
"""`RisingFloor`: a smallest scale that rises on a schedule."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from lossscale.core import validation
from lossscale.core.data_policies.octaves import fill_like
from lossscale.core.data_policies.rule_based import RuleBased
from lossscale.core.state import Array, Signal, State, Where
from lossscale.core.validation import format_value
from lossscale.errors import SettingError, SettingTypeError


class RisingFloorState(NamedTuple):
    """A `ScaleState` and a count of steps."""

    scale: Array
    good_steps: Array
    bad_steps: Array
    steps: Array
    """Steps so far; a float32 number, which stops counting at 2**24."""


@dataclass(frozen=True, kw_only=True)
class RisingFloor(RuleBased):
    """A dynamic scale whose floor rises at given steps.

    ::

        floor  = the last scale of `floors` whose step has come, or rule.min_scale
        finite:   scale' = what the rule says, and at least the floor
        overflow: scale' = what the rule says, not below the floor

    Late in training gradients are small, and overflows that no scale would prevent
    must not drag the scale down to where they vanish. The source is Mellempudi et al.,
    2019 (arXiv 1905.12334), who trained a translation model in float8 with 8192 from
    step 40,000 on and 32768 from step 150,000 on: the defaults.

    An overflow never raises the scale: a floor that has just risen above the scale is
    reached with the next finite step. No measurement is read.

    Example:
        >>> from lossscale import Dynamic, RisingFloor, Signal
        >>> policy = RisingFloor(Dynamic(init_scale=64.0), floors=((2, 128.0),))
        >>> state, scales = policy.init(), []
        >>> for finite in (False, True, False):
        ...     state = policy.step(
        ...         state, Signal(finite), where=lambda c, a, b: a if c else b
        ...     )
        ...     scales.append(state.scale)
        >>> scales
        [32.0, 128.0, 128.0]
    """

    floors: tuple[tuple[int, float], ...] = ((40_000, 8192.0), (150_000, 32768.0))
    """Pairs of a step and the floor from that step on, in order."""

    def __post_init__(self) -> None:
        """Check every setting, and keep it as plain Python numbers."""
        super().__post_init__()
        object.__setattr__(self, "floors", _check_floors(self.floors))
        highest = self.floors[-1][1]
        if highest > self.rule.max_scale:
            message = (
                f"The last of floors, {highest!r}, is above "
                f"max_scale={self.rule.max_scale!r}."
            )
            raise SettingError(message)

    def init(self) -> State:
        """Return the first state."""
        return RisingFloorState(*self.rule.init(), 0.0)

    def step(self, state: State, signal: Signal, *, where: Where) -> State:
        """Return the state after a step."""
        steps = state.steps + 1.0  # from 2**24 on the same number
        floor = fill_like(steps, self.rule.settings.min_scale, where)
        for step, scale in self.floors:
            floor = where(steps >= step, validation.as_float32(scale), floor)
        ruled = self.follow_rule(state, signal, where)
        held = where(ruled.scale >= floor, ruled.scale, floor)
        # After an overflow at most the scale before it, whatever the floor is.
        lowered = where(held <= state.scale, held, state.scale)
        after = RisingFloorState(
            where(signal.finite, held, lowered),
            ruled.good_steps,
            ruled.bad_steps,
            steps,
        )
        return self.keep_if_loss_nonfinite(state, after, signal, where)


_LAST_STEP = 2**24
"""float32 counts no further."""


def _check_floors(floors: Any) -> tuple[tuple[int, float], ...]:
    """Return the schedule as tuples of plain numbers, or raise."""
    expected = "pairs of a step and a scale, such as ((40_000, 8192.0),)"
    try:
        pairs = [tuple(pair) for pair in floors]
    except TypeError:
        pairs = []
    if not pairs or any(len(pair) != _PAIR for pair in pairs):
        message = f"floors must be {expected}, got {format_value(floors)}."
        raise SettingTypeError(message)
    checked = tuple(
        (
            validation.check_count("A step of floors", step),
            validation.check_scale("A scale of floors", scale),
        )
        for step, scale in pairs
    )
    for (step, scale), (next_step, next_scale) in pairwise(checked):
        if not (step < next_step and scale <= next_scale):
            message = f"floors must rise step by step, got {format_value(floors)}."
            raise SettingError(message)
    if checked[-1][0] >= _LAST_STEP:
        message = f"floors must be over by step 2**24, got {format_value(floors)}."
        raise SettingError(message)
    return checked


_PAIR = 2
