# SPDX-License-Identifier: Apache-2.0
"""`OverflowRate`: a scale that tolerates a fraction of overflows."""

from dataclasses import dataclass
from typing import NamedTuple

from lossscale.core import validation
from lossscale.core.data_policies.octaves import fill_like
from lossscale.core.data_policies.rule_based import NEVER, RuleBased
from lossscale.core.state import Array, Signal, State, Where


class OverflowRateState(NamedTuple):
    """A `ScaleState`, and what happened since the scale moved."""

    scale: Array
    good_steps: Array
    bad_steps: Array
    steps: Array
    """Steps since the scale moved."""
    overflows: Array
    """Overflows since the scale was lowered."""


@dataclass(frozen=True, kw_only=True)
class OverflowRate(RuleBased):
    """A dynamic scale that backs off only when too many of its steps overflow.

    ::

        an overflow lowers the scale if
        overflows since it was lowered / steps since it moved >= tolerance

    Every overflow still skips its step. With a tolerance of 0 every overflow lowers the
    scale, as with `Dynamic`. The source is fairseq's `DynamicLossScaler`
    (`--fp16-scale-tolerance`), which does the same until the scale reaches its floor:
    there fairseq stops with an error, and this policy stays at the floor. Overflows are
    not forgotten when the scale grows, as in fairseq. `rule.hysteresis` is not used.

    No measurement is read.

    Example:
        >>> from lossscale import OverflowRate, Signal
        >>> policy = OverflowRate(tolerance=0.25)
        >>> state, scales = policy.init(), []
        >>> for finite in (True, True, True, True, False, False):
        ...     state = policy.step(
        ...         state, Signal(finite), where=lambda c, a, b: a if c else b
        ...     )
        ...     scales.append(state.scale)
        >>> scales
        [65536.0, 65536.0, 65536.0, 65536.0, 65536.0, 32768.0]
    """

    tolerance: float = 0.05
    """The fraction of overflows from which on the scale is lowered."""

    def __post_init__(self) -> None:
        """Check every setting, and keep it as a plain Python number."""
        super().__post_init__()
        tolerance = validation.check_between("tolerance", self.tolerance, 0, 1)
        object.__setattr__(self, "tolerance", tolerance)

    def init(self) -> State:
        """Return the first state: nothing counted."""
        return OverflowRateState(*self.rule.init(), 0.0, 0.0)

    def step(self, state: State, signal: Signal, *, where: Where) -> State:
        """Return the state after a step."""
        steps = state.steps + 1.0  # from 2**24 on the same number
        overflows = where(signal.finite, state.overflows, state.overflows + 1.0)
        tolerance = validation.as_float32(self.tolerance)
        lower = where(signal.finite, steps < 0.0, overflows / steps >= tolerance)
        never = fill_like(state.bad_steps, NEVER, where)
        ruled = self.follow_rule(
            state, signal, where, hysteresis=where(lower, 1, never)
        )
        # The rule ends its count of finite steps where it grows, and at overflows.
        grew = where(
            signal.finite, ruled.good_steps < state.good_steps + 1, steps < 0.0
        )
        after = OverflowRateState(
            *ruled,
            where(grew, 0.0, where(lower, 0.0, steps)),
            where(lower, 0.0, overflows),
        )
        return self.keep_if_loss_nonfinite(state, after, signal, where)
