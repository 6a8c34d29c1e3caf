# SPDX-License-Identifier: Apache-2.0
"""What a framework provides for the classic classes.

A binding knows how its framework keeps variables, checks gradients for non-finite
values and does one thing only if a flag is set. It knows nothing about scales: the rule
stays in the core.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from lossscale.core.policies import Policy
from lossscale.core.state import Array, ScaleState, Signal


class Variable(NamedTuple):
    """How a class wants one of its variables to be kept."""

    name: str
    """The name under which it is checkpointed."""
    dtype: str
    """"float32", "int32" or "int64"."""


class StateVariables(Protocol):
    """A `ScaleState` kept in a framework's variables."""

    def read(self) -> ScaleState:
        """Return the current values as tensors."""
        ...

    def read_for_repr(self) -> ScaleState | None:
        """Return the current values for `repr`; `None` where they cannot be read."""
        ...

    def assign(self, state: ScaleState) -> Any:
        """Store new values: `None` where that happens at once, else an op to run."""
        ...


class Binding(Protocol):
    """The framework's side of the classic classes."""

    def create_variables(
        self,
        owner: Any,
        state: ScaleState,
        scale: Variable,
        good: Variable,
        bad: Variable | None,
    ) -> StateVariables:
        """Create the variables of a class, owned (and checkpointed) by `owner`.

        Without `bad` there is no such variable, and it reads as 0.
        """
        ...

    def check_context(self, method: str) -> None:
        """Raise, saying what to do, if an update may not be made from here.

        Under a distribution strategy it may only be made across replicas.
        """
        ...

    def constant(self, value: float) -> Array:
        """Return a float32 scalar tensor."""
        ...

    def as_scale(self, value: Any) -> Array:
        """Return the scale that a user's class gave as a float32 scalar, or raise.

        Raises a TypeError or ValueError for what is no number.
        """
        ...

    def flag(self, finite: Any) -> Array:
        """Return what a user passed as `finite` as a boolean scalar, or raise."""
        ...

    def all_finite(self, grads: Any) -> Array:
        """Return whether all gradients are finite, as a boolean scalar."""
        ...

    def update(self, policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
        """Return the state after a step: the framework's function of that name."""
        ...

    def nothing(self) -> Any:
        """Return what an update without effect returns: `None`, or a no-op."""
        ...

    def scale_loss(self, loss: Any, loss_scale: Array) -> Any:
        """Return the loss times the scale, in float32."""
        ...

    def unscale(self, grads: list[Any], loss_scale: Array) -> list[Any]:
        """Return the gradients divided by the scale; `None` stays `None`."""
        ...

    def across_replicas(self, function: Callable[..., Any], *lists: list[Any]) -> Any:
        """Call `function(*lists)` once for all replicas; without any, just call it.

        What it is given holds the gradients and variables of every replica.
        """
        ...

    def in_each_replica(self, function: Callable[..., Any], *lists: list[Any]) -> Any:
        """The way back: call the function in each replica with what is its own."""
        ...

    def transaction(
        self,
        permitted: Array,
        apply: Callable[[], Any],
        skip: Callable[[], Any],
        is_finite: Callable[[], Array],
        update: Callable[[Array | None], Any],
    ) -> Any:
        """Run `apply` if permitted, else `skip`; then `update` in any case.

        `update` is given whether the step was skipped although the gradients are
        finite, which `is_finite` says of a skipped step; or `None` where `apply` was
        run. If `apply` raises, `update` does not happen: the scale and the weights move
        together or not at all. Returns what `apply` returns, or an op that does all of
        it.
        """
        ...

    def unless(self, condition: Array, ask: Callable[[], tuple[Any, Any]]) -> Array:
        """Return False if a condition holds, else the flag that `ask` returns.

        `ask` returns what there is to run, and a flag; it has run when the flag is
        known.
        """
        ...


class EagerBinding:
    """The part of a `Binding` that is the same wherever everything happens at once."""

    flag: Callable[[Any], Array]

    def as_scale(self, value: Any) -> Array:
        """Return the scale as it is, without waiting for a device."""
        if value is None or isinstance(value, str):
            raise TypeError
        return value

    def check_context(self, method: str) -> None:
        """Allow everything: there are no replicas."""

    def nothing(self) -> None:
        """Return what an update without effect returns."""
        return

    def across_replicas(self, function: Callable[..., Any], *lists: list[Any]) -> Any:
        """Call the function."""
        return function(*lists)

    in_each_replica = across_replicas

    def transaction(
        self,
        permitted: Array,
        apply: Callable[[], Any],
        skip: Callable[[], Any],
        is_finite: Callable[[], Array],
        update: Callable[[Array | None], Any],
    ) -> Any:
        """Run one or the other, then `update`; where there is a device, wait for it."""
        applied = bool(permitted)
        result = apply() if applied else skip()
        update(None if applied else is_finite())
        return result

    def unless(self, condition: Array, ask: Callable[[], tuple[Any, Any]]) -> Array:
        """Ask if a condition does not hold."""
        return self.flag(False if bool(condition) else ask()[1])
