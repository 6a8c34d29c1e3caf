# SPDX-License-Identifier: Apache-2.0
"""Run policies over a sequence of finite and non-finite steps.

The sequence is given, so every policy sees the same overflows whatever its scale: the
question answered is what a policy *does*, not what a network would have done.

A million steps of a hundred policies are a hundred million transitions. They are taken
by the rule itself, compiled to machine code by numba from the one source in
`core/rule.py` (a few nanoseconds each, whatever the settings). Without numba, and for
policies that are not `Dynamic`, steps are taken one by one through `lossscale.numpy`.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import lossscale.numpy as verbs
from lossscale.core.errors import SettingError
from lossscale.core.policies import Dynamic, Fixed, Policy
from lossscale.core.rule import transition
from lossscale.core.state import ScaleState, Signal

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
    """How many of them were not finite."""
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


def simulate(
    policies: Sequence[Policy],
    finite: npt.ArrayLike,
    *,
    on_policy: Callable[[], None] | None = None,
) -> list[Simulation]:
    """Run policies over a sequence of steps.

    Args:
        policies: Any policies.
        finite: One boolean per step: was it finite?
        on_policy: Called after each policy, for a progress bar.

    Returns:
        One `Simulation` per policy, in their order.

    Raises:
        SettingError: If `finite` is not one row of booleans.

    Example:
        >>> from lossscale import Dynamic
        >>> from lossscale.diagnostics import simulate
        >>> result, = simulate([Dynamic(growth_interval=2)], [True, True, False])
        >>> result.scale_after([0, 1, 2, 3]).tolist()
        [65536.0, 65536.0, 131072.0, 65536.0]
    """
    flags = np.asarray(finite)
    if flags.ndim != 1 or flags.dtype != np.bool_:
        message = (
            "finite must be one row of booleans, one per step; got an array of "
            f"{flags.dtype} with shape {flags.shape}."
        )
        raise SettingError(message)
    results = []
    for policy in policies:
        # Exactly a Dynamic: a subclass may have a step of its own.
        if type(policy) is Dynamic and (runner := _compiled()) is not None:
            results.append(_at_once(runner, policy, flags))
        else:
            results.append(_one_by_one(policy, flags))
        if on_policy is not None:
            on_policy()
    return results


def _one_by_one(policy: Policy, flags: Flags) -> Simulation:
    """Run any policy, step by step; a fixed one takes none."""
    state = verbs.init(policy)
    steps, scales = [0], [state.scale]
    taken = flags[:0] if type(policy) is Fixed else flags
    for number, finite in enumerate(taken, start=1):
        state = verbs.update(policy, state, Signal(finite))
        if state.scale != scales[-1]:
            steps.append(number)
            scales.append(state.scale)
    changes = np.array(steps, np.int64), np.array(scales, np.float32)
    return _simulation(policy, flags, *changes, state)


def _at_once(runner: Callable[..., Any], policy: Dynamic, flags: Flags) -> Simulation:
    """Run a dynamic policy by the compiled rule."""
    # Python floats are float64 to numba; the rule's arithmetic is float32.
    settings = tuple(
        np.float32(value) if isinstance(value, float) else value
        for value in policy.settings
    )
    first = policy.init()
    steps, scales, scale, good, bad = runner(
        flags,
        np.float32(first.scale),
        first.good,
        first.bad,
        settings,
        tuple(policy.switches),
    )
    state = ScaleState(np.float32(scale), np.int32(good), np.int32(bad))
    return _simulation(policy, flags, steps, scales, state)


def _simulation(
    policy: Policy, flags: Flags, steps: Steps, scales: Scales, final: ScaleState
) -> Simulation:
    skipped = int(np.count_nonzero(~flags))
    return Simulation(policy, flags.size, skipped, steps, scales, final)


@cache
def _compiled() -> Callable[..., Any] | None:
    """Return a function that runs the rule over a sequence, or None without numba."""
    try:
        import numba  # noqa: PLC0415  # half a second, and only simulations need it
    except ImportError:
        message = (
            "numba is not installed: the simulation takes its steps one by one, a "
            "few thousand times slower. Install it: pip install 'lossscale[cli]'"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return None

    rule: Any = numba.njit(transition)
    where: Any = numba.njit(
        lambda condition, first, second: first if condition else second
    )

    @numba.njit
    def run(
        flags: Flags,
        scale: Any,
        good: int,
        bad: int,
        settings: tuple[Any, ...],
        switches: tuple[bool, ...],
    ) -> tuple[Steps, Scales, Any, int, int]:
        steps, scales = [0], [scale]
        for index in range(flags.size):
            moved, good, bad = rule(
                scale, good, bad, flags[index], *settings, *switches, where
            )
            if moved != scale:
                steps.append(index + 1)
                scales.append(moved)
            scale = moved
        return np.array(steps), np.array(scales), scale, good, bad

    return cast("Callable[..., Any]", run)
