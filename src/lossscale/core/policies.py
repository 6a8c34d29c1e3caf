# SPDX-License-Identifier: Apache-2.0
"""Policies: the settings of a loss scale, and how a step moves it.

`Policy` is a protocol of two methods. `Fixed` and `Dynamic` implement it, and so does
any frozen dataclass you write; `Dynamic` itself is final. Settings are checked at
construction. The transition itself is in `rule.py` and is not restated here.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

from lossscale.core import validation
from lossscale.core.measurements import Measurement
from lossscale.core.rule import transition
from lossscale.core.state import Array, ScaleState, Signal, Where
from lossscale.errors import SettingError, SettingTypeError


@runtime_checkable
class Policy(Protocol):
    """How a loss scale starts and how a step moves it.

    A policy is immutable and hashable; everything that changes is in the state. It
    must work with `signal.finite` alone: other measurements may be `None`. A policy may
    have an attribute `wants`, a tuple of the measurements that it reads ("amax", an
    `AboveEdge`, ...): what owns the training step then takes those that it can. Its
    state may be a NamedTuple of its own: `scale`, `good_steps`, `bad_steps`, and
    further float32 numbers.

    Example:
        >>> from lossscale import Dynamic, Fixed, Policy
        >>> all(isinstance(policy, Policy) for policy in (Fixed(), Dynamic()))
        True
    """

    def init(self) -> ScaleState:
        """Return the first state, as Python numbers."""
        ...

    def step(self, state: ScaleState, signal: Signal, *, where: Where) -> ScaleState:
        """Return the state after a step, in the kind of array that `state` holds."""
        ...


def advance(
    policy: Policy, state: ScaleState, signal: Signal, *, where: Where
) -> ScaleState:
    """Return the state after a step, by the policy.

    A step that was skipped because a finite gradient is too large leaves the state as
    it is, whatever the policy: the scale did not cause it.

    Example:
        >>> from lossscale import Dynamic, Signal
        >>> from lossscale.core.policies import advance
        >>> policy = Dynamic()
        >>> signal = Signal(finite=False, too_large=True)
        >>> advance(policy, policy.init(), signal, where=lambda c, a, b: a if c else b)
        ScaleState(scale=65536.0, good_steps=0, bad_steps=0)
    """
    after = policy.step(state, signal, where=where)
    if signal.too_large is None:
        return after
    return choose(signal.too_large, state, after, where=where)


def choose(
    condition: Array, first: ScaleState, second: ScaleState, *, where: Where
) -> ScaleState:
    """Return one of two states, number by number."""
    pairs = zip(first, second, strict=True)
    return type(first)(*(where(condition, left, right) for left, right in pairs))


def is_policy(value: Any) -> bool:
    """Whether this is a policy; a class of policies, which has their methods, is none.

    Example:
        >>> from lossscale import Dynamic
        >>> from lossscale.core.policies import is_policy
        >>> is_policy(Dynamic()), is_policy(Dynamic)
        (True, False)
    """
    return isinstance(value, Policy) and not isinstance(value, type)


def require_policy(policy: Any) -> None:
    """Raise unless this is a policy, and not its class, its name or what has one."""
    if is_policy(policy):
        return
    if isinstance(policy, type) and hasattr(policy, "step"):
        fix = f" Write {policy.__name__}()."
    elif isinstance(policy, str):
        fix = " For another library's settings, pass lossscale.presets.get('torch')."
    elif isinstance(getattr(policy, "policy", None), Policy):
        fix = f" Pass the .policy of the {type(policy).__name__}."
    else:
        fix = ""
    message = (
        "policy must be a policy, such as lossscale.Dynamic() or lossscale.Fixed(8.0), "
        f"got {validation.format_value(policy)}.{fix}"
    )
    raise SettingTypeError(message)


def wanted_measurements(policy: Policy) -> tuple[Measurement, ...]:
    """Return the measurements that a policy reads besides the flags."""
    wants: tuple[Measurement, ...] = getattr(policy, "wants", ())
    return wants


class Settings(NamedTuple):
    """The numbers that `transition` takes, in its order, rounded to float32."""

    growth_factor: float
    growth_threshold: int
    good_after_growth: int
    backoff: float
    hysteresis: int
    min_scale: float
    max_scale: float


class Switches(NamedTuple):
    """The booleans that `transition` takes, in its order."""

    backoff_divides: bool
    hold_at_min: bool
    clamp_at_max: bool
    finite_clears_bad: bool
    backoff_clears_bad: bool


@dataclass(frozen=True)
class Fixed:
    """A scale that never moves.

    Steps with non-finite gradients are still reported by `Signal.finite`, for the
    caller to skip.

    Example:
        >>> from lossscale import Fixed
        >>> Fixed(1024.0).init().scale
        1024.0
    """

    scale: float = 2.0**15
    """The scale; its reciprocal must be finite in float32 too."""

    def __post_init__(self) -> None:
        """Check the scale."""
        object.__setattr__(self, "scale", validation.check_scale("scale", self.scale))

    def init(self) -> ScaleState:
        """Return the only state there is."""
        return ScaleState(self.scale, 0, 0)

    def step(self, state: ScaleState, signal: Signal, *, where: Where) -> ScaleState:
        """Return the state as it is."""
        del signal, where
        return state


class _Prepared:
    """Arguments of the rule, computed once; not settings, so not dataclass fields.

    Not `cached_property`: its lock breaks `torch.compile` before Python 3.12.
    """

    settings: Settings
    switches: Switches


@dataclass(frozen=True, kw_only=True)
class Dynamic(_Prepared):
    """A scale that grows after finite steps and backs off after overflows.

    The defaults are torch's numbers, with a floor and a cap that keep both the scale
    and its reciprocal normal float32 numbers. `lossscale.presets` holds the settings
    with which a `Dynamic` behaves as another library does.

    Example:
        >>> from lossscale import Dynamic
        >>> Dynamic(growth_interval=100, hysteresis=2).init()
        ScaleState(scale=65536.0, good_steps=0, bad_steps=0)
    """

    init_scale: float = 2.0**16
    """The scale to start with. Too high costs a few skipped steps, too low far more
    steps of lost gradients."""

    growth_factor: float = 2.0
    """What the scale is multiplied by when it grows; above 1."""

    backoff_factor: float | None = None
    """What the scale is multiplied by when it backs off; between 0 and 1. It is 0.5
    unless `backoff_divisor` is given."""

    growth_interval: int = 2000
    """How many finite steps in a row make the scale grow."""

    hysteresis: int = 1
    """How many overflows make the scale back off. Every one of them skips its step."""

    min_scale: float = validation.SMALLEST_NORMAL
    """The floor: no back-off goes below it."""

    max_scale: float = 2.0**126
    """The cap: no growth goes above it."""

    backoff_divisor: float | None = None
    """What the scale is divided by when it backs off, instead of `backoff_factor`.
    Dividing by 3 undoes a growth by 3; multiplying by a rounded 1/3 does not."""

    at_min: Literal["clamp", "hold"] = "clamp"
    """At the floor: go to `min_scale` exactly, or leave the scale."""

    at_max: Literal["hold", "clamp"] = "hold"
    """At the cap: leave the scale, or go to `max_scale` exactly. Leaving it keeps a
    power of two a power of two, and unscaling exact."""

    growth_delay: Literal["never", "first", "always"] = "never"
    """Whether growth takes one finite step more than `growth_interval`: never, only
    the first time after an overflow (DeepSpeed), or always (flax)."""

    consecutive_overflows: bool = False
    """Whether only consecutive overflows add up to `hysteresis`: a finite step clears
    the count. Otherwise they accumulate until the scale grows or backs off."""

    backoff_resets_hysteresis: bool = True
    """Whether a back-off clears the count of overflows. If not, every overflow after
    it backs off again, until growth (or, with `consecutive_overflows`, a
    finite step) clears
    the count (Megatron, DeepSpeed)."""

    hold_on_nonfinite_loss: bool = False
    """Whether a step whose loss was not finite *before* it was scaled leaves the scale
    as it is: a lower scale would not have helped. Its step is skipped all the same. It
    needs `Signal.loss_finite`; where the loss was not checked it changes nothing."""

    def __post_init__(self) -> None:
        """Check every setting, and keep it as a plain Python number."""
        if isinstance(self.init_scale, str) and self.init_scale == "auto":
            message = (
                "init_scale must be a number, got 'auto'. For a start that is found on "
                "the first batch, pass the policy AutoStart()."
            )
            raise SettingTypeError(message)
        growth = validation.check_above_one("growth_factor", self.growth_factor)
        factor, divisor = self.backoff_factor, self.backoff_divisor
        if factor is not None and divisor is not None:
            message = (
                f"backoff_factor={factor!r} and backoff_divisor={divisor!r} were both "
                "given; give one of them and leave the other out (or None)."
            )
            raise SettingError(message)
        if divisor is None:
            factor = 0.5 if factor is None else factor
            factor = validation.check_below_one("backoff_factor", factor)
        else:
            divisor = validation.check_above_one("backoff_divisor", divisor)
        checked = {
            "init_scale": validation.check_scale("init_scale", self.init_scale),
            "growth_factor": growth,
            "backoff_factor": factor,
            "growth_interval": validation.check_count(
                "growth_interval", self.growth_interval
            ),
            "hysteresis": validation.check_count(
                "hysteresis", self.hysteresis, "overflows"
            ),
            "min_scale": validation.check_scale("min_scale", self.min_scale),
            "max_scale": validation.check_scale("max_scale", self.max_scale),
            "backoff_divisor": divisor,
            "at_min": validation.check_choice("at_min", self.at_min, ("clamp", "hold")),
            "at_max": validation.check_choice("at_max", self.at_max, ("hold", "clamp")),
            "growth_delay": validation.check_choice(
                "growth_delay", self.growth_delay, ("never", "first", "always")
            ),
            "consecutive_overflows": validation.check_bool(
                "consecutive_overflows", self.consecutive_overflows
            ),
            "backoff_resets_hysteresis": validation.check_bool(
                "backoff_resets_hysteresis", self.backoff_resets_hysteresis
            ),
            "hold_on_nonfinite_loss": validation.check_bool(
                "hold_on_nonfinite_loss", self.hold_on_nonfinite_loss
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.min_scale > self.max_scale:
            message = (
                f"min_scale={self.min_scale!r} is above max_scale={self.max_scale!r}; "
                "the floor must not be above the cap."
            )
            raise SettingError(message)
        if not self.min_scale <= self.init_scale <= self.max_scale:
            nearest = max(self.min_scale, min(self.init_scale, self.max_scale))
            origin = " (the default)" if self.init_scale == Dynamic.init_scale else ""
            message = (
                f"init_scale={self.init_scale!r}{origin} must lie between "
                f"min_scale={self.min_scale!r} and max_scale={self.max_scale!r}. Pass "
                f"init_scale too, such as init_scale={nearest!r}."
            )
            raise SettingError(message)
        object.__setattr__(self, "settings", self._settings())
        object.__setattr__(self, "switches", self._switches())

    def _settings(self) -> Settings:
        """Return the numbers that the rule takes."""
        divisor = self.backoff_divisor
        backoff = cast("float", self.backoff_factor if divisor is None else divisor)
        return Settings(
            growth_factor=validation.as_float32(self.growth_factor),
            growth_threshold=self.growth_interval + (self.growth_delay != "never"),
            good_after_growth=int(self.growth_delay == "first"),
            backoff=validation.as_float32(backoff),
            hysteresis=self.hysteresis,
            min_scale=validation.as_float32(self.min_scale),
            max_scale=validation.as_float32(self.max_scale),
        )

    def _switches(self) -> Switches:
        """Return the switches that the rule takes."""
        return Switches(
            backoff_divides=self.backoff_divisor is not None,
            hold_at_min=self.at_min == "hold",
            clamp_at_max=self.at_max == "clamp",
            finite_clears_bad=self.consecutive_overflows,
            backoff_clears_bad=self.backoff_resets_hysteresis,
        )

    def is_stuck(self, scale: float) -> bool:
        """Whether no step could ever move a scale that is below the floor.

        Holding at the floor refuses every result below it, a growth's too.
        """
        raised = validation.as_float32(scale) * self.settings.growth_factor
        raised = validation.as_float32(min(raised, validation.FLOAT32_MAX))
        return self.switches.hold_at_min and raised < self.settings.min_scale

    def init(self) -> ScaleState:
        """Return the first state: the initial scale, nothing counted."""
        return ScaleState(self.init_scale, 0, 0)

    def step(self, state: ScaleState, signal: Signal, *, where: Where) -> ScaleState:
        """Return the state after a step; see `lossscale.core.rule.transition`."""
        moved = transition(
            state.scale,
            state.good_steps,
            state.bad_steps,
            signal.finite,
            *self.settings,
            *self.switches,
            where,
        )
        return self.keep_if_loss_nonfinite(state, ScaleState(*moved), signal, where)

    def keep_if_loss_nonfinite(
        self, before: ScaleState, after: ScaleState, signal: Signal, where: Where
    ) -> ScaleState:
        """Return the state before a step if its loss was not finite, else after."""
        if not self.hold_on_nonfinite_loss or signal.loss_finite is None:
            return after
        return choose(signal.loss_finite, after, before, where=where)
