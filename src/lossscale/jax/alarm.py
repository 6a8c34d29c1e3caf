# SPDX-License-Identifier: Apache-2.0
"""A warning after many skipped steps in a row, for training loops on the host.

The compiled step does not contain it, and the loop does not wait for the device: a
result is read once it is ready.
"""

import warnings
from collections import deque
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core import validation
from lossscale.core.state import Array, Signal
from lossscale.errors import CollapseError, CollapseWarning, GradientError


class _Step(NamedTuple):
    """The values of one step that are pending on the device."""

    finite: Array
    too_large: Array | None
    loss_finite: Array | None
    scale: Array


class CollapseAlarm:
    """Warns, or raises, after a number of skipped steps in a row.

    Call it once per step, outside of `jit`, with the signal and the scale. A step is
    counted once the device has finished it, so a warning may come a few calls late;
    `flush` waits for all of them.

    Example:
        >>> import lossscale, lossscale.jax as ls
        >>> alarm = ls.CollapseAlarm(limit=3, on_collapse="raise")
        >>> for _ in range(2):
        ...     alarm(lossscale.Signal(finite=False), scale=8.0)
        >>> alarm.flush()
        >>> alarm.consecutive_skips
        2
    """

    def __init__(
        self, limit: int = 100, on_collapse: Literal["warn", "raise"] = "warn"
    ) -> None:
        """Set the limit.

        Args:
            limit: The number of skipped steps in a row that triggers the alarm.
            on_collapse: "warn" warns once for each such row, "raise" raises.

        Raises:
            SettingError: If `limit` is not at least 1, or `on_collapse` is neither
                "warn" nor "raise".
        """
        self._limit = validation.check_count("limit", limit, "skipped steps")
        choices = ("warn", "raise")
        self._raises = (
            validation.check_choice("on_collapse", on_collapse, choices) == "raise"
        )
        self._pending: deque[_Step] = deque()
        self._reasons: dict[str, int] = {}
        self._first_scale = 0.0
        self.consecutive_skips = 0
        """How many steps in a row were skipped, among those that were counted."""

    def __call__(self, signal: Signal, scale: Array) -> None:
        """Record a step.

        Args:
            signal: The signal of the step. With optax:
                `Signal(opt_state.last_finite, too_large=opt_state.last_too_large)`.
            scale: The scale after it, such as `state.scale`.

        Raises:
            CollapseError: If `limit` steps in a row were skipped, with
                `on_collapse="raise"`.
            GradientError: If `signal` is not a `Signal`.
        """
        if not isinstance(signal, Signal):
            message = f"signal must be a Signal, got {validation.format_value(signal)}."
            raise GradientError(message)
        step = _Step(signal.finite, signal.too_large, signal.loss_finite, scale)
        # Copies: the next step may reuse the buffers of a donated state.
        self._pending.append(jax.tree.map(jnp.copy, step))
        self._receive(wait=False)

    def flush(self) -> None:
        """Wait for all recorded steps, and warn or raise if there is a reason."""
        self._receive(wait=True)

    def _receive(self, *, wait: bool) -> None:
        """Count the steps that the device has finished, in order."""
        while self._pending and (
            wait or all(leaf.is_ready() for leaf in jax.tree.leaves(self._pending[0]))
        ):
            self._count(self._pending.popleft())

    def _count(self, step: _Step) -> None:
        if bool(step.finite):
            self.consecutive_skips = 0
            self._reasons = {}
            return
        if not self.consecutive_skips:
            self._first_scale = float(step.scale)
        self.consecutive_skips += 1
        reason = _get_reason(step)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if self.consecutive_skips != self._limit:
            return
        message = self._format_message(float(step.scale))
        if self._raises:
            raise CollapseError(message)
        warnings.warn(message, CollapseWarning, stacklevel=4)

    def _format_message(self, scale: float) -> str:
        """Describe the skipped steps, and what to do about them."""
        counts = ", ".join(f"{n} {reason}" for reason, n in self._reasons.items())
        return (
            f"{self._limit} steps in a row were skipped; nothing is being trained. The "
            f"scale went from {self._first_scale:g} to {scale:g}. Reasons: {counts}. "
            f"{_advise(set(self._reasons))}"
        )


_LOSS, _LARGE, _OVERFLOW = "loss not finite", "gradient too large", "overflow"


def _get_reason(step: _Step) -> str:
    """Return why a step was skipped, according to its signal."""
    if step.loss_finite is not None and not bool(step.loss_finite):
        return _LOSS
    if step.too_large is not None and bool(step.too_large):
        return _LARGE
    return _OVERFLOW


def _advise(reasons: set[str]) -> str:
    """Return what to try, given the reasons of all the steps."""
    if reasons == {_LOSS}:
        return (
            "The loss itself is infinite or NaN: a lower scale does not help. Check "
            "the forward pass."
        )
    if reasons == {_LARGE}:
        return (
            "The unscaled gradients are too large to be squared: a lower scale does "
            "not help. Check the loss, and lower the learning rate."
        )
    return (
        "Find the gradients with lossscale.jax.leaf_flags and nonfinite_leaves, and "
        "check the backward pass in float32: gradients that are infinite at scale 1 "
        "are infinite at every scale."
    )
