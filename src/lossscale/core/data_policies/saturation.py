# SPDX-License-Identifier: Apache-2.0
"""`Saturation`: lower the scale when values reach the maximum, else raise it slowly."""

from dataclasses import dataclass

from lossscale.core import validation
from lossscale.core.data_policies.rule_based import RuleBased, is_above_edge
from lossscale.core.measurements import AboveEdge, Measurement
from lossscale.core.state import Signal, State, Where


@dataclass(frozen=True, kw_only=True)
class Saturation(RuleBased):
    """Half the scale when values saturate, a little more of it when none do.

    ::

        scale' = scale / 2                     if more than `fraction` saturate
                 scale * 2**(1 / doubling)     otherwise

    The source is FP8-LM (Peng et al., 2023, arXiv 2310.18313): gradients are stored in
    a format that saturates instead of overflowing, more than 0.001 % of the values at
    its maximum halve the scale, and otherwise it doubles in a thousand steps. For such
    a format set `edge` to its maximum (448 for E4M3): every step is applied. The
    default edge is half of float16's maximum, below which nothing has overflowed.

    The scale is not a power of two, so unscaling rounds. An overflow is decided by
    `rule`. Where the fraction is not measured (`Signal.above_edge`), a largest
    magnitude at the edge counts as too many. Without a measured `amax`, `rule` decides
    alone.

    Example:
        >>> from lossscale import Saturation, Signal
        >>> policy = Saturation(edge=448.0)
        >>> signal = Signal(finite=True, amax=448.0)
        >>> choose = lambda condition, a, b: a if condition else b
        >>> policy.step(policy.init(), signal, where=choose).scale
        32768.0
    """

    edge: float = 32752.0
    """The magnitude, still scaled, from which on a value counts as saturated."""

    fraction: float = 1e-5
    """The fraction of saturated values that is allowed."""

    doubling: int = 1000
    """Steps in which the scale doubles if nothing saturates."""

    def __post_init__(self) -> None:
        """Check every setting, and keep it as a plain Python number."""
        super().__post_init__()
        checked = {
            "edge": validation.check_scale("edge", self.edge),
            "fraction": validation.check_between("fraction", self.fraction, 0, 1),
            "doubling": validation.check_window("doubling", self.doubling),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def wants(self) -> tuple[Measurement, ...]:
        """The measurements that the policy reads besides the flags."""
        return ("amax", AboveEdge(self.edge, inclusive=True))

    def init(self) -> State:
        """Return the first state."""
        return self.rule.init()

    def step(self, state: State, signal: Signal, *, where: Where) -> State:
        """Return the state after a step."""
        ruled = self.follow_rule(state, signal, where)
        saturated = is_above_edge(signal, self.edge, self.fraction, inclusive=True)
        if saturated is None:
            return self.keep_if_loss_nonfinite(state, ruled, signal, where)
        growth = validation.as_float32(2.0 ** (1.0 / self.doubling))
        moved = where(
            saturated,
            self.lower_scale(state.scale, 2.0, where),
            self.raise_scale(state.scale, growth, where),
        )
        after = ruled._replace(scale=where(signal.finite, moved, ruled.scale))
        return self.keep_if_loss_nonfinite(state, after, signal, where)
