# SPDX-License-Identifier: Apache-2.0
"""Run policies over a sequence of steps.

Whether a step overflows is given, and then the same for every policy whatever its
scale; or it follows from the scale and the largest magnitude of the step's gradients,
where that is known. The magnitudes themselves are given in any case: the question
answered is what a policy *does*, not what a network would have learned.

The steps are taken by the rule itself. A million steps of a hundred policies are a
hundred million transitions: then the one source in `core/rule.py` is compiled to
machine code by numba, if it is installed. Policies that are not `Dynamic` take their
steps through `lossscale.numpy`.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

import lossscale.numpy as ls
from lossscale.core import validation
from lossscale.core.headroom import LARGEST
from lossscale.core.policies import Dynamic, Fixed, Policy
from lossscale.core.rule import transition
from lossscale.core.state import ScaleState, Signal
from lossscale.errors import SettingError

Flags = npt.NDArray[np.bool_]
Steps = npt.NDArray[np.int64]
Scales = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Simulation:
    """What one policy did over a sequence.

    The trajectory is kept as its changes: `scales[i]` is the scale after step
    `steps[i]` (counted from 1) and until the next change; `steps[0]` is 0, the start.

    Example:
        >>> from lossscale import Dynamic
        >>> from lossscale.diagnostics import simulate
        >>> result, = simulate([Dynamic(growth_interval=1)], [True, False])
        >>> result.growths, result.backoffs
        (1, 1)
    """

    policy: Policy
    """The policy that was run."""
    length: int
    """How many steps were run."""
    skipped: int
    """How many of them were not finite under this policy."""
    steps: Steps
    """The steps after which the scale was another."""
    scales: Scales
    """The scale after each of them."""
    final: ScaleState
    """The state after the last step."""

    @property
    def growths(self) -> int:
        """How often the scale went up."""
        return int(np.count_nonzero(self.scales[1:] > self.scales[:-1]))

    @property
    def backoffs(self) -> int:
        """How often the scale went down."""
        return int(np.count_nonzero(self.scales[1:] < self.scales[:-1]))

    def scale_after(self, steps: npt.ArrayLike) -> Scales:
        """Return the scale after each of the given steps; 0 is the start."""
        places = np.searchsorted(self.steps, np.asarray(steps), side="right") - 1
        return self.scales[places]


WORTH_COMPILING = 2_000_000
"""How many transitions take about as long as importing numba and compiling the rule:
`benchmarks/simulate.py` measures both."""

_CHUNK = 2**20
"""Steps between two chances to interrupt compiled code: some milliseconds."""


class _Sequence(NamedTuple):
    """The steps: finite or not and, where it is known, up to which scale."""

    flags: Flags
    limits: Scales | None
    """The largest scale at which each step is finite: 0 if there is none."""

    def chunks(self) -> Iterator[Scales]:
        """Yield the limits in pieces."""
        for start in range(0, self.flags.size, _CHUNK):
            piece = slice(start, start + _CHUNK)
            if self.limits is None:
                yield np.where(self.flags[piece], np.float32(np.inf), np.float32(0))
            else:
                yield self.limits[piece]


def simulate(
    policies: Sequence[Policy],
    finite: npt.ArrayLike,
    *,
    magnitudes: npt.ArrayLike | None = None,
    dtype: str = "float16",
    on_policy: Callable[[], None] | None = None,
) -> list[Simulation]:
    """Run policies over a sequence of steps.

    Args:
        policies: Any policies.
        finite: One boolean per step: was it finite? The step is finite, or not, at
            every scale, unless its magnitude is known.
        magnitudes: The largest magnitude of each step's unscaled gradients. The step
            overflows where that times the scale is above the largest number of
            `dtype`. NaN where it is not known: there `finite` decides.
        dtype: The dtype of the gradients: float16, bfloat16, float32 or float64.
        on_policy: Called after each policy, for a progress bar.

    Returns:
        One `Simulation` per policy, in their order.

    Raises:
        SettingError: If `finite` is not one row of booleans, `magnitudes` not as many
            numbers of 0 or more, or `dtype` not one of those.

    Example:
        >>> from lossscale import Dynamic
        >>> from lossscale.diagnostics import simulate
        >>> result, = simulate([Dynamic(growth_interval=2)], [True, True, False])
        >>> result.scale_after([0, 1, 2, 3]).tolist()
        [65536.0, 65536.0, 131072.0, 65536.0]

        With magnitudes a scale grows until it is too high:

        >>> steps = [True] * 1000
        >>> result, = simulate(
        ...     [Dynamic(growth_interval=2)], steps, magnitudes=[0.25] * 1000
        ... )
        >>> result.scales.max().item()
        262144.0
    """
    sequence = _sequence(finite, magnitudes, dtype)
    # Exactly a Dynamic: a subclass may have a step of its own.
    dynamic = sum(type(policy) is Dynamic for policy in policies)
    runner = _loop(transition, _select)
    if dynamic * sequence.flags.size > WORTH_COMPILING:
        runner = _compile_loop() or runner
    results = []
    for policy in policies:
        if type(policy) is Dynamic:
            results.append(_by_the_rule(runner, policy, sequence))
        elif type(policy) is Fixed:
            results.append(_without_steps(policy, sequence))
        else:
            results.append(_one_by_one(policy, sequence))
        if on_policy is not None:
            on_policy()
    return results


def _sequence(
    finite: npt.ArrayLike, magnitudes: npt.ArrayLike | None, dtype: str
) -> _Sequence:
    """Return the steps, checked."""
    flags = np.asarray(finite)
    if flags.ndim != 1 or flags.dtype != np.bool_:
        message = (
            "finite must be one row of booleans, one per step; got an array of "
            f"{flags.dtype} with shape {flags.shape}."
        )
        raise SettingError(message)
    largest = LARGEST[validation.check_choice("dtype", dtype, LARGEST)]
    if magnitudes is None:
        return _Sequence(flags, None)
    values = np.asarray(magnitudes)
    if values.ndim != 1 or values.dtype.kind not in "fiu":
        message = (
            "magnitudes must be one row of numbers, one per step; got an array of "
            f"{values.dtype} with shape {values.shape}."
        )
        raise SettingError(message)
    if values.size != flags.size:
        message = (
            "There must be as many magnitudes as steps; got "
            f"{values.size:,} magnitudes and {flags.size:,} steps."
        )
        raise SettingError(message)
    values = values.astype(np.float64)
    if (values < 0).any():
        message = "magnitudes must be 0 or more, or NaN where they are not known."
        raise SettingError(message)
    return _Sequence(flags, _limits(flags, values, largest))


def _limits(flags: Flags, values: npt.NDArray[np.float64], largest: float) -> Scales:
    """Return the largest float32 scale at which each step is finite."""
    replayed = np.where(flags, np.inf, 0.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        limits = (largest / values).astype(np.float32)
        # The quotient was rounded, twice; the product with a scale is exact.
        limits = np.where(limits * values > largest, _next(limits, 0), limits)
        higher = _next(limits, np.inf)
        limits = np.where(higher * values <= largest, higher, limits)
    return np.where(np.isnan(values), replayed, limits).astype(np.float32)


def _next(scales: Scales, towards: float) -> Scales:
    return cast("Scales", np.nextafter(scales, np.float32(towards)))


def _by_the_rule(
    runner: Callable[..., Any], policy: Dynamic, sequence: _Sequence
) -> Simulation:
    """Run a dynamic policy by the rule, compiled or not."""
    # Python floats are float64; the rule's arithmetic is float32.
    settings = tuple(
        np.float32(value) if isinstance(value, float) else value
        for value in policy.settings
    )
    first = policy.init()
    state: tuple[Any, ...] = (
        np.float32(first.scale),
        first.good_steps,
        first.bad_steps,
    )
    steps = [np.zeros(1, np.int64)]
    scales = [np.array([first.scale], np.float32)]
    skipped = taken = 0
    with np.errstate(over="ignore", under="ignore"):
        for limits in sequence.chunks():
            at, moved, overflows, scale, good, bad = runner(
                limits, *state, settings, tuple(policy.switches)
            )
            # Compiled code returns a Python float, and would go on in float64.
            state = np.float32(scale), good, bad
            steps.append(at[1:] + taken)
            scales.append(moved[1:])
            skipped += overflows
            taken += len(limits)
    scale, good, bad = state
    final = ScaleState(scale, np.int32(good), np.int32(bad))
    changes = np.concatenate(steps), np.concatenate(scales)
    return Simulation(policy, taken, skipped, *changes, final)


def _without_steps(policy: Fixed, sequence: _Sequence) -> Simulation:
    """Return what a fixed scale does: nothing."""
    state = ls.init(policy)
    skipped = sum(
        int(np.count_nonzero(limits < state.scale)) for limits in sequence.chunks()
    )
    start = np.zeros(1, np.int64), np.array([state.scale], np.float32)
    return Simulation(policy, sequence.flags.size, skipped, *start, state)


def _one_by_one(policy: Policy, sequence: _Sequence) -> Simulation:
    """Run any policy, step by step."""
    state = ls.init(policy)
    steps, scales = [0], [state.scale]
    skipped = 0
    for number, (finite, state) in enumerate(_states(policy, sequence), start=1):
        skipped += not finite
        if state.scale != scales[-1]:
            steps.append(number)
            scales.append(state.scale)
    changes = np.array(steps, np.int64), np.array(scales, np.float32)
    return Simulation(policy, sequence.flags.size, skipped, *changes, state)


def trace(
    policy: Policy,
    finite: npt.ArrayLike,
    *,
    magnitudes: npt.ArrayLike | None = None,
    dtype: str = "float16",
) -> Iterator[tuple[bool, ScaleState]]:
    """Yield whether each step was finite, and the state after it; see `simulate`."""
    return _states(policy, _sequence(finite, magnitudes, dtype))


def _states(policy: Policy, sequence: _Sequence) -> Iterator[tuple[bool, ScaleState]]:
    state = ls.init(policy)
    for limits in sequence.chunks():
        for limit in limits:
            finite = bool(state.scale <= limit)
            state = ls.update(policy, state, Signal(finite))
            yield finite, state


def _select(condition: bool, first: Any, second: Any) -> Any:
    return first if condition else second


def _loop(rule: Callable[..., Any], where: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that takes the steps; numba compiles the same source."""

    def run(
        limits: Scales,
        scale: Any,
        good: int,
        bad: int,
        settings: tuple[Any, ...],
        switches: tuple[bool, ...],
    ) -> tuple[Steps, Scales, int, Any, int, int]:
        steps, scales, skipped = [0], [scale], 0
        for index in range(len(limits)):
            finite = scale <= limits[index]
            moved, good, bad = rule(
                scale, good, bad, finite, *settings, *switches, where
            )
            if not finite:
                skipped += 1
            if moved != scale:
                steps.append(index + 1)
                scales.append(moved)
            scale = moved
        return np.array(steps), np.array(scales), skipped, scale, good, bad

    return run


@cache
def _compile_loop() -> Callable[..., Any] | None:
    """Return the loop in machine code, or None without numba."""
    try:
        import numba  # noqa: PLC0415  # a second, and only long simulations need it
    except ImportError:
        message = (
            "numba is not installed: a step takes more than fifty times as long as a "
            "compiled one. Install it: pip install 'lossscale[simulate]'"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return None
    compiled = numba.njit(_loop(numba.njit(transition), numba.njit(_select)))
    return _make_interruptible(cast("Callable[..., Any]", compiled))


def _make_interruptible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function that ^C ends with KeyboardInterrupt.

    One that comes while numba calls Python from C arrives as a SystemError.
    """

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except SystemError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, KeyboardInterrupt):
                cause = cause.__cause__
            if cause is None:
                raise
            raise KeyboardInterrupt from error

    return call
