# SPDX-License-Identifier: Apache-2.0
"""`WindowFollowsScale`: the higher the scale, the longer the wait for growth."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lossscale.core import validation
from lossscale.core.data_policies.octaves import fill_like
from lossscale.core.data_policies.rule_based import NEVER, RuleBased
from lossscale.core.policies import Dynamic
from lossscale.core.state import Array, Signal, State, Where
from lossscale.errors import SettingError


class WindowFollowsScaleState(NamedTuple):
    """A `ScaleState` and a count of finite steps that can be compared with a scale."""

    scale: Array
    good_steps: Array
    bad_steps: Array
    waited: Array
    """Finite steps since the last growth or overflow; a float32 number."""


@dataclass(frozen=True)
class WindowFollowsScale(RuleBased):
    """A dynamic scale whose growth interval is proportional to the scale.

    ::

        interval = rule.growth_interval * scale / rule.init_scale, and at least 1

    Doubling the scale doubles the wait for the next doubling, and halving it halves
    the wait: a scale that fell recovers fast, a high one is raised rarely. The source
    is metaseq's loss scaler, written for OPT-175B, where runs became unstable after the
    scale had climbed; the default rule has its numbers (4, 256 steps, a floor of
    2**-5). metaseq shortens the interval further where the scale is at its floor, and
    tolerates a fraction of overflows as well; that is `OverflowRate`.

    No measurement is read.

    Example:
        >>> from lossscale import Dynamic, Signal, WindowFollowsScale
        >>> policy = WindowFollowsScale(Dynamic(init_scale=4.0, growth_interval=2))
        >>> state, scales = policy.init(), []
        >>> for _ in range(6):
        ...     state = policy.step(
        ...         state, Signal(True), where=lambda c, a, b: a if c else b
        ...     )
        ...     scales.append(state.scale)
        >>> scales
        [4.0, 8.0, 8.0, 8.0, 8.0, 16.0]
    """

    rule: Dynamic = field(
        default_factory=lambda: Dynamic(
            init_scale=4.0, growth_interval=256, min_scale=2.0**-5, at_min="hold"
        )
    )
    """Where the scale starts, the interval there, and the bounds."""

    def __post_init__(self) -> None:
        """Check the rule."""
        super().__post_init__()
        if self.rule.growth_delay != "never":
            message = (
                f"growth_delay={self.rule.growth_delay!r} does not work with "
                "WindowFollowsScale; use a rule with growth_delay='never'."
            )
            raise SettingError(message)

    def init(self) -> State:
        """Return the first state."""
        return WindowFollowsScaleState(*self.rule.init(), 0.0)

    def step(self, state: State, signal: Signal, *, where: Where) -> State:
        """Return the state after a step."""
        per_scale = self.rule.growth_interval / self.rule.init_scale
        per_scale = min(per_scale, validation.FLOAT32_MAX)
        interval = state.scale * validation.as_float32(per_scale)
        waited = where(signal.finite, state.waited + 1.0, 0.0)
        due = waited >= where(interval >= 1.0, interval, 1.0)
        never = fill_like(state.good_steps, NEVER, where)
        ruled = self.follow_rule(
            state, signal, where, growth_threshold=where(due, 1, never)
        )
        after = WindowFollowsScaleState(*ruled, where(due, 0.0, waited))
        return self.keep_if_loss_nonfinite(state, after, signal, where)
