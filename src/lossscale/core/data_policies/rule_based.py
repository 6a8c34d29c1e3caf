# SPDX-License-Identifier: Apache-2.0
"""What the data policies share: the rule that they fall back to, and its bounds."""

from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from lossscale.core.measurements import Measurement
from lossscale.core.policies import Dynamic
from lossscale.core.rule import transition
from lossscale.core.state import Array, ScaleState, Signal, State, Where
from lossscale.core.validation import (
    FLOAT32_MAX,
    SMALLEST_NORMAL,
    as_float32,
    format_value,
    name_type,
)
from lossscale.errors import SettingTypeError

NEVER = 2**31 - 2
"""A threshold that no counter reaches."""


@dataclass(frozen=True)
class RuleBased:
    """A policy that holds a `Dynamic` and follows it where it knows nothing better."""

    rule: Dynamic = field(default_factory=Dynamic)
    """Where the scale starts, its bounds, and what an overflow does to it."""

    def __post_init__(self) -> None:
        """Check the rule."""
        if not isinstance(self.rule, Dynamic):
            message = (
                f"rule must be a Dynamic, got {format_value(self.rule)}."
                f"{self._suggest_rule()}"
            )
            raise SettingTypeError(message)

    def _suggest_rule(self) -> str:
        """Return what to write instead of what was given as the rule, if it is known.

        The argument keeps its name: in some policies other settings come before it.
        """
        given: Any = self.rule
        is_number = isinstance(given, Real) and not isinstance(given, bool)
        if is_number and SMALLEST_NORMAL <= given <= FLOAT32_MAX:
            rule = f"Dynamic(init_scale={float(given)!r})"
        elif given is Dynamic:
            rule = "Dynamic()"
        elif isinstance(given, str):
            rule = "presets.get('torch')"
        elif isinstance(getattr(given, "policy", None), Dynamic):
            rule = f"{name_type(given).lower()}.policy"
        else:
            return ""
        return f" Write {type(self).__name__}(rule={rule})."

    @property
    def wants(self) -> tuple[Measurement, ...]:
        """The measurements that the policy reads besides the flags."""
        return ()

    @property
    def hold_on_nonfinite_loss(self) -> bool:
        """Whether a step whose loss was not finite leaves the state as it is."""
        return self.rule.hold_on_nonfinite_loss

    def follow_rule(
        self, state: State, signal: Signal, where: Where, **replaced: Any
    ) -> ScaleState:
        """Return the scale and the counters after a step by the rule.

        Args:
            state: The state before the step.
            signal: What the step measured.
            where: The framework's select.
            replaced: Settings of the rule that differ in this step.
        """
        settings = self.rule.settings._replace(**replaced)
        scale, good_steps, bad_steps = state[:3]
        moved = transition(
            scale,
            good_steps,
            bad_steps,
            signal.finite,
            *settings,
            *self.rule.switches,
            where,
        )
        return ScaleState(*moved)

    def keep_if_loss_nonfinite(
        self, before: State, after: State, signal: Signal, where: Where
    ) -> State:
        """Return the state before a step if its loss was not finite, else after."""
        return self.rule.keep_if_loss_nonfinite(before, after, signal, where)

    def raise_scale(self, scale: Array, factor: float, where: Where) -> Array:
        """Return a scale times a factor above 1, or as it is if the cap is below."""
        up = scale * factor
        return where(up <= self.rule.settings.max_scale, up, scale)

    def lower_scale(self, scale: Array, divisor: Array, where: Where) -> Array:
        """Return a scale divided by a number of 1 or more, held at the floor."""
        down = scale / divisor
        return where(
            down >= self.rule.settings.min_scale, down, self.rule.settings.min_scale
        )


def observe_magnitude(
    signal: Signal, scale: Array, at_overflow: Array, where: Where
) -> Array:
    """Return the largest magnitude of a step without its scale; 0.0 if there is none.

    Subnormal results count as none: some frameworks flush them to zero. Results are
    held within 2**126.

    Args:
        signal: What the step measured, `amax` included.
        scale: The scale of the step.
        at_overflow: What an overflow counts as.
        where: The framework's select.
    """
    magnitude = where(signal.finite, signal.amax / scale, at_overflow)
    magnitude = where(magnitude <= _LARGEST_SEEN, magnitude, _LARGEST_SEEN)
    return where(magnitude >= SMALLEST_NORMAL, magnitude, 0.0)


_LARGEST_SEEN = 2.0**126


def is_above_edge(
    signal: Signal, edge: float, fraction: float, *, inclusive: bool = False
) -> Array | None:
    """Return whether more than a fraction of the values is above an edge.

    The largest magnitude alone decides where the fraction was not measured; `None`
    where that was not measured either.
    """
    if signal.above_edge is not None:
        return signal.above_edge > as_float32(fraction)
    if signal.amax is None:
        return None
    limit = as_float32(edge)
    return signal.amax >= limit if inclusive else signal.amax > limit
