# SPDX-License-Identifier: Apache-2.0
"""`Headroom`: the scale that the largest recent gradient allows, less a margin."""

from dataclasses import dataclass
from typing import NamedTuple

from lossscale.core import validation
from lossscale.core.data_policies.octaves import round_up_to_power
from lossscale.core.data_policies.rule_based import RuleBased, observe_magnitude
from lossscale.core.measurements import Measurement
from lossscale.core.state import Array, Signal, State, Where


class HeadroomState(NamedTuple):
    """A `ScaleState` and the largest magnitudes of two windows."""

    scale: Array
    good_steps: Array
    bad_steps: Array
    peak: Array
    """The largest unscaled magnitude of the current window; 0.0 if there is none."""
    last_peak: Array
    """The same of the window before it."""
    age: Array
    """How many steps the current window has."""


@dataclass(frozen=True, kw_only=True)
class Headroom(RuleBased):
    """The largest recent gradient stays `margin` doublings below the format's maximum.

    ::

        peak   = the largest |gradient| / scale of the last `window` steps, or more
        limit  = largest * 2**-margin
        scale' = 2 * scale              if 2 * scale * peak <= limit
                 scale / 2**k           if scale * peak > limit, the smallest such k
                 scale                  otherwise

    So the scale rises by at most one doubling per step and falls as far as it must. It
    moves by powers of two. An overflow is decided by `rule`, and counts as a magnitude
    that just allows the scale to which it led: for the next window the scale does not
    return to where it overflowed. Without a measured `amax`, and while every gradient
    is zero, `rule` decides alone.

    The formula is that of delayed scaling in TransformerEngine (`amax` history and
    `margin`), used for a loss scale; NVIDIA's documentation has the original.

    `amax` is that of the gradients of the weights. Gradients inside the network may be
    larger, and overflow first: that is what `margin` is for.

    Example:
        >>> from lossscale import Dynamic, Headroom, Signal
        >>> policy = Headroom(Dynamic(init_scale=1024.0), margin=3)
        >>> signal = Signal(finite=True, amax=2.0)
        >>> policy.step(policy.init(), signal, where=lambda c, a, b: a if c else b)[:3]
        (2048.0, 1, 0)
    """

    margin: float = 3.0
    """Doublings between the largest recent gradient and the maximum of the format."""

    window: int = 500
    """Steps after which a magnitude is forgotten, and at most twice as many."""

    largest: float = 65504.0
    """The maximum of the format in which gradients are computed; float16's."""

    def __post_init__(self) -> None:
        """Check every setting, and keep it as a plain Python number."""
        super().__post_init__()
        checked = {
            "margin": validation.check_between("margin", self.margin, 0, 32),
            "window": validation.check_window("window", self.window),
            "largest": validation.check_scale("largest", self.largest),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def wants(self) -> tuple[Measurement, ...]:
        """The measurements that the policy reads besides the flags."""
        return ("amax",)

    def init(self) -> State:
        """Return the first state: nothing seen."""
        return HeadroomState(*self.rule.init(), 0.0, 0.0, 0.0)

    def step(self, state: State, signal: Signal, *, where: Where) -> State:
        """Return the state after a step."""
        ruled = self.follow_rule(state, signal, where)
        if signal.amax is None:
            after = state._replace(**ruled._asdict())
            return self.keep_if_loss_nonfinite(state, after, signal, where)
        limit = validation.as_float32(self.largest * 2.0**-self.margin)
        magnitude = observe_magnitude(signal, state.scale, limit / ruled.scale, where)
        peak = where(magnitude > state.peak, magnitude, state.peak)
        amax = where(peak > state.last_peak, peak, state.last_peak)
        age = state.age + 1.0
        full = age >= self.window
        after = HeadroomState(
            where(
                signal.finite, self._move(state, ruled, amax, limit, where), ruled[0]
            ),
            ruled.good_steps,
            ruled.bad_steps,
            where(full, 0.0, peak),
            where(full, peak, state.last_peak),
            where(full, 0.0, age),
        )
        return self.keep_if_loss_nonfinite(state, after, signal, where)

    def _move(
        self, state: State, ruled: State, amax: Array, limit: float, where: Where
    ) -> Array:
        """Return the scale after a finite step."""
        scale = state.scale
        # Times a reciprocal: compilers replace a division by a constant themselves.
        use = scale * amax * validation.as_float32(1.0 / limit)
        use = where(use <= 2.0**126, use, 2.0**126)
        fits_twice = use * 2.0 <= 1.0
        lowered = self.lower_scale(
            scale, round_up_to_power(where(use >= 1.0, use, 1.0), where), where
        )
        raised = self.raise_scale(scale, 2.0, where)
        moved = where(use > 1.0, lowered, where(fits_twice, raised, scale))
        return where(amax > 0.0, moved, ruled.scale)
