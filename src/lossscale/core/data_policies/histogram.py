# SPDX-License-Identifier: Apache-2.0
"""`Histogram`: lower the scale when values pass an edge, raise it when none do."""

from dataclasses import dataclass
from typing import NamedTuple

from lossscale.core import validation
from lossscale.core.data_policies.rule_based import RuleBased, is_above_edge
from lossscale.core.measurements import AboveEdge, Measurement
from lossscale.core.state import Array, Signal, State, Where


class HistogramState(NamedTuple):
    """A `ScaleState` and what was seen since the last move."""

    scale: Array
    good_steps: Array
    bad_steps: Array
    passed: Array
    """1.0 if values passed the edge in this period, else 0.0."""
    age: Array
    """Steps since the last move."""


@dataclass(frozen=True, kw_only=True)
class Histogram(RuleBased):
    """Twice the scale, or half of it, by whether values passed an edge.

    ::

        every `period` steps:
        scale' = scale / 2    if more than `fraction` of the values were above `edge`
                 scale * 2    otherwise

    The source is Graphcore's automatic loss scaling (PopART, `loss scale update`): the
    edge is an eighth of float16's maximum and the fraction 1e-7. The scale moves up and
    down around the edge by design, three doublings below an overflow: it prevents
    overflows instead of waiting for them. Those that come all the same are decided by
    `rule`, and start a new period.

    Where the fraction is not measured (`Signal.above_edge`), a largest magnitude above
    the edge counts as too many. Without a measured `amax`, `rule` decides alone.

    Example:
        >>> from lossscale import Histogram, Signal
        >>> policy = Histogram(period=1)
        >>> signal = Signal(finite=True, amax=10000.0)
        >>> choose = lambda condition, a, b: a if condition else b
        >>> policy.step(policy.init(), signal, where=choose).scale
        32768.0
    """

    edge: float = 0.125 * 65504.0
    """The magnitude, still scaled, above which a value counts."""

    fraction: float = 1e-7
    """The fraction of values above the edge that is allowed."""

    period: int = 10
    """Steps between two moves."""

    def __post_init__(self) -> None:
        """Check every setting, and keep it as a plain Python number."""
        super().__post_init__()
        checked = {
            "edge": validation.check_scale("edge", self.edge),
            "fraction": validation.check_between("fraction", self.fraction, 0, 1),
            "period": validation.check_window("period", self.period),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def wants(self) -> tuple[Measurement, ...]:
        """The measurements that the policy reads besides the flags."""
        return ("amax", AboveEdge(self.edge))

    def init(self) -> State:
        """Return the first state: nothing seen."""
        return HistogramState(*self.rule.init(), 0.0, 0.0)

    def step(self, state: State, signal: Signal, *, where: Where) -> State:
        """Return the state after a step."""
        ruled = self.follow_rule(state, signal, where)
        above = is_above_edge(signal, self.edge, self.fraction)
        if above is None:
            after = state._replace(**ruled._asdict())
            return self.keep_if_loss_nonfinite(state, after, signal, where)
        passed = where(above, 1.0, state.passed)
        age = state.age + 1.0
        due = age >= self.period
        moved = where(
            passed > 0.0,
            self.lower_scale(state.scale, 2.0, where),
            self.raise_scale(state.scale, 2.0, where),
        )
        moved = where(due, moved, state.scale)
        passed, age = where(due, 0.0, passed), where(due, 0.0, age)
        after = HistogramState(
            where(signal.finite, moved, ruled.scale),
            ruled.good_steps,
            ruled.bad_steps,
            where(signal.finite, passed, 0.0),
            where(signal.finite, age, 0.0),
        )
        return self.keep_if_loss_nonfinite(state, after, signal, where)
