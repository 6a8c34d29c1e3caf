# SPDX-License-Identifier: Apache-2.0
"""`Attempts`: the first batch again, until the policy has found its first scale."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, cast

from lossscale.core.policies import Policy
from lossscale.core.state import Array, ScaleState, State
from lossscale.core.validation import format_value
from lossscale.errors import SettingError


class Starting(Protocol):
    """A policy that searches its first scale."""

    tries: int
    """How many attempts may follow the first one."""

    def is_starting(self, state: State) -> Array:
        """Return whether the first scale is still being searched."""
        ...


class Progress(NamedTuple):
    """How far a scaler is."""

    updates: int
    """How often `update` was called."""
    read: Callable[[], tuple[ScaleState, int]]
    """Returns the state and how many steps in a row were skipped; waits."""


def find_starting(policy: Policy) -> Starting:
    """Return a policy as one that searches its first scale, or raise."""
    if not hasattr(policy, "is_starting"):
        message = (
            "attempts() repeats the batches on which a policy searches its first "
            f"scale; this scaler has {format_value(policy)}, which does not. Pass "
            "policy=lossscale.AutoStart(...) to GradScaler."
        )
        raise SettingError(message)
    return cast("Starting", policy)


def repeat(
    policy: Starting, look: Callable[[], Progress], note_start: Callable[[], None]
) -> Iterator[int]:
    """Yield 1, 2, ... as long as the batch is to be computed again.

    Args:
        policy: The policy.
        look: Returns how far the scaler is; without a wait.
        note_start: Called when the search is over.
    """
    for attempt in range(1, policy.tries + 2):
        before = look()
        scale = float(before.read()[0].scale)
        yield attempt
        after = look()
        if after.updates == before.updates:
            return  # the caller has given the batch up
        state, skipped = after.read()
        if not bool(policy.is_starting(state)):
            note_start()
            return
        if not skipped or float(state.scale) >= scale:
            return  # gradients that are all zero; or another attempt could not differ
