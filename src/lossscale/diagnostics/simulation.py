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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import lossscale.numpy as ls
from lossscale.core.data_policies import RuleBased
from lossscale.core.policies import (
    Dynamic,
    Fixed,
    Policy,
    is_policy,
    wanted_measurements,
)
from lossscale.core.rule import transition
from lossscale.core.state import ScaleState, Signal
from lossscale.core.validation import format_value
from lossscale.diagnostics.sequences import Scales, StepSequence, make_sequence
from lossscale.errors import SettingTypeError

Steps = npt.NDArray[np.int64]


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
        indices = np.searchsorted(self.steps, np.asarray(steps), side="right") - 1
        return self.scales[indices]


WORTH_COMPILING = 2_000_000
"""How many transitions take about as long as importing numba and compiling the rule:
`benchmarks/simulate.py` measures both."""

_CHUNK = 2**20
"""Steps between two chances to interrupt compiled code: some milliseconds."""


def _chunks(sequence: StepSequence) -> Iterator[Scales]:
    """Yield the limits in pieces."""
    for start in range(0, sequence.length, _CHUNK):
        yield sequence.limits[start : start + _CHUNK]


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
        SettingTypeError: If `policies` is not a list of policies.
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
    policies = list_policies(policies)
    sequence = make_sequence(finite, magnitudes, dtype)
    # Exactly a Dynamic: a subclass may have a step of its own.
    dynamic = sum(type(policy) is Dynamic for policy in policies)
    compiled = dynamic * sequence.length > WORTH_COMPILING
    results = []
    for policy in policies:
        results += run_policy(policy, [sequence], compiled=compiled)
        if on_policy is not None:
            on_policy()
    return results


def list_policies(policies: Iterable[Policy]) -> list[Policy]:
    """Return policies as a list.

    Raises:
        SettingTypeError: If they are not policies, or no list of them.
    """
    is_list = isinstance(policies, Iterable) and not isinstance(policies, str)
    listed = list(policies) if is_list else []
    wrong = [policy for policy in listed if not is_policy(policy)]
    if is_list and not wrong:
        return listed
    given: Any = wrong[0] if wrong else policies
    if is_policy(given):
        fix = f" Write [{type(given).__name__}(...)]."
    elif isinstance(given, str):
        fix = " For another library's settings, pass [lossscale.presets.get('torch')]."
    else:
        fix = ""
    message = (
        "policies must be policies such as [lossscale.Dynamic()], in a list; got "
        f"{format_value(given)}.{fix}"
    )
    raise SettingTypeError(message)


def run_policy(
    policy: Policy, sequences: Sequence[StepSequence], *, compiled: bool = False
) -> list[Simulation]:
    """Run a policy over several sequences of one length: one result for each.

    Args:
        policy: Any policy.
        sequences: Sequences that differ in their limits alone. The policies of the core
            are elementwise: they take a step of all of them at once.
        compiled: Compile the rule, if numba is installed.
    """
    if type(policy) is Dynamic:
        runner = _loop(transition, _select)
        runner = (_compile_loop() if compiled else None) or runner
        return [_by_the_rule(runner, policy, sequence) for sequence in sequences]
    if type(policy) is Fixed:
        return [_without_steps(policy, sequence) for sequence in sequences]
    if isinstance(policy, RuleBased):
        return _one_by_one(policy, sequences)
    return [_one_by_one(policy, [sequence])[0] for sequence in sequences]


def _by_the_rule(
    runner: Callable[..., Any], policy: Dynamic, sequence: StepSequence
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
    skipped = count = 0
    with np.errstate(over="ignore", under="ignore"):
        for limits in _chunks(sequence):
            positions, moved, overflows, scale, good, bad = runner(
                limits, *state, settings, tuple(policy.switches)
            )
            # Compiled code returns a Python float, and would go on in float64.
            state = np.float32(scale), good, bad
            steps.append(positions[1:] + count)
            scales.append(moved[1:])
            skipped += overflows
            count += len(limits)
    scale, good, bad = state
    final = ScaleState(scale, np.int32(good), np.int32(bad))
    changes = np.concatenate(steps), np.concatenate(scales)
    return Simulation(policy, count, skipped, *changes, final)


def _without_steps(policy: Fixed, sequence: StepSequence) -> Simulation:
    """Return what a fixed scale does: nothing."""
    state = ls.init(policy)
    skipped = sum(
        int(np.count_nonzero(limits < state.scale)) for limits in _chunks(sequence)
    )
    start = np.zeros(1, np.int64), np.array([state.scale], np.float32)
    return Simulation(policy, sequence.length, skipped, *start, state)


def _one_by_one(policy: Policy, sequences: Sequence[StepSequence]) -> list[Simulation]:
    """Run any policy, step by step, over all sequences at once."""
    count = len(sequences)
    state = ls.init(policy)
    before = np.full(count, state.scale)
    steps: list[list[int]] = [[0] for _ in range(count)]
    scales = [[state.scale] for _ in range(count)]
    skipped = np.zeros(count, np.int64)
    for number, (finite, state) in enumerate(_states(policy, sequences), start=1):
        skipped += ~finite
        after = np.atleast_1d(state.scale)
        if (after != before).any():
            for index in np.flatnonzero(after != before):
                steps[index].append(number)
                scales[index].append(after[index])
            before = after
    return [
        Simulation(
            policy,
            sequences[index].length,
            int(skipped[index]),
            np.array(steps[index], np.int64),
            np.array(scales[index], np.float32),
            type(state)(*(np.broadcast_to(value, count)[index] for value in state)),
        )
        for index in range(count)
    ]


def trace(
    policy: Policy,
    finite: npt.ArrayLike,
    *,
    magnitudes: npt.ArrayLike | None = None,
    dtype: str = "float16",
) -> Iterator[tuple[Any, ScaleState]]:
    """Yield whether each step was finite, and the state after it; see `simulate`."""
    return _states(policy, [make_sequence(finite, magnitudes, dtype)])


def _states(
    policy: Policy, sequences: Sequence[StepSequence]
) -> Iterator[tuple[Any, ScaleState]]:
    """Yield whether a step is finite, and the state after it.

    Of one sequence both are scalars, of several a vector with one entry for each.
    """
    state = ls.init(policy)
    magnitudes = sequences[0].magnitudes
    if "amax" not in wanted_measurements(policy):
        magnitudes = None
    limits = sequences[0].limits
    if len(sequences) > 1:
        limits = np.stack([sequence.limits for sequence in sequences], axis=1)
        state = type(state)(*(np.full(len(sequences), value) for value in state))
    for step, limit in enumerate(limits):
        finite = state.scale <= limit
        amax = None
        if magnitudes is not None and not np.isnan(magnitudes[step]):
            with np.errstate(over="ignore"):
                amax = np.float32(magnitudes[step] * state.scale)
        state = ls.update(policy, state, Signal(finite, amax=amax))
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
