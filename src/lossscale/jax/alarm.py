# SPDX-License-Identifier: Apache-2.0
"""A warning when nothing but skipped steps come in, for training loops on the host.

The compiled step knows nothing of it, and the loop does not wait for the device: a
result is read when it is there.
"""

import warnings
from collections import deque
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core import validation
from lossscale.core.state import Signal
from lossscale.errors import CollapseError, CollapseWarning, GradientError


class _Step(NamedTuple):
    """What is kept of a step, on the device."""

    finite: Any
    too_large: Any
    loss_finite: Any
    scale: Any


class CollapseAlarm:
    """Warns, or raises, after so many skipped steps in a row.

    Call it once per step, outside of `jit`, with the signal and the scale. A step is
    looked at when the device has finished it, so a warning may come a few calls late;
    `flush` waits for all of them.

    Example:
        >>> import lossscale, lossscale.jax as ls
        >>> alarm = ls.CollapseAlarm(limit=3, on_collapse="raise")
        >>> for _ in range(2):
        ...     alarm(lossscale.Signal(finite=False), scale=8.0)
        >>> alarm.flush()
        >>> alarm.skipped_in_a_row
        2
    """

    def __init__(
        self, limit: int = 100, on_collapse: Literal["warn", "raise"] = "warn"
    ) -> None:
        """Set the limit.

        Args:
            limit: How many skipped steps in a row are too many.
            on_collapse: "warn" warns once for each such row, "raise" raises.

        Raises:
            SettingError: If `limit` is not at least 1, or `on_collapse` neither word.
        """
        self._limit = validation.check_count("limit", limit)
        choices = ("warn", "raise")
        self._raises = (
            validation.check_choice("on_collapse", on_collapse, choices) == "raise"
        )
        self._pending: deque[_Step] = deque()
        self._reasons: dict[str, int] = {}
        self._first_scale = 0.0
        self.skipped_in_a_row = 0
        """How many steps in a row were skipped, of those that are known."""

    def __call__(self, signal: Signal, scale: Any) -> None:
        """Take in a step.

        Args:
            signal: What the step saw. With optax:
                `Signal(opt_state.last_finite, too_large=opt_state.last_too_large)`.
            scale: The scale after it, such as `state.scale`.

        Raises:
            CollapseError: If too many steps in a row were skipped, and it is to raise.
            GradientError: If `signal` is not a `Signal`.
        """
        if not isinstance(signal, Signal):
            message = f"signal must be a Signal, got {validation.format_value(signal)}."
            raise GradientError(message)
        step = _Step(signal.finite, signal.too_large, signal.loss_finite, scale)
        # Copies: the next step may be allowed to use the memory of the state.
        self._pending.append(jax.tree.map(jnp.copy, step))
        self._receive(wait=False)

    def flush(self) -> None:
        """Wait for all steps that were taken in, and say what there is to say."""
        self._receive(wait=True)

    def _receive(self, *, wait: bool) -> None:
        """Count the steps that the device has finished, in order."""
        while self._pending and (
            wait or all(leaf.is_ready() for leaf in jax.tree.leaves(self._pending[0]))
        ):
            self._count(self._pending.popleft())

    def _count(self, step: _Step) -> None:
        if bool(step.finite):
            self.skipped_in_a_row = 0
            self._reasons = {}
            return
        if not self.skipped_in_a_row:
            self._first_scale = float(step.scale)
        self.skipped_in_a_row += 1
        reason = _reason(step)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if self.skipped_in_a_row != self._limit:
            return
        message = self._message(float(step.scale))
        if self._raises:
            raise CollapseError(message)
        warnings.warn(message, CollapseWarning, stacklevel=4)

    def _message(self, scale: float) -> str:
        """Say what was seen, and what follows from it."""
        counts = ", ".join(f"{n} {reason}" for reason, n in self._reasons.items())
        return (
            f"{self._limit} steps in a row were skipped; nothing is being trained. The "
            f"scale went from {self._first_scale:g} to {scale:g}. Reasons: {counts}. "
            f"{_advice(set(self._reasons))}"
        )


_LOSS, _LARGE, _OVERFLOW = "loss not finite", "gradient too large", "overflow"


def _reason(step: _Step) -> str:
    """Return why a step was skipped, as far as the signal says."""
    if step.loss_finite is not None and not bool(step.loss_finite):
        return _LOSS
    if step.too_large is not None and bool(step.too_large):
        return _LARGE
    return _OVERFLOW


def _advice(reasons: set[str]) -> str:
    """Return what to try, by the reasons of all the steps."""
    if reasons == {_LOSS}:
        return (
            "The loss itself is infinite or NaN: no scale helps. Check the forward "
            "pass."
        )
    if reasons == {_LARGE}:
        return (
            "The true gradients cannot be squared: no scale helps. Check the loss, and "
            "lower the learning rate."
        )
    return (
        "Find the gradients with lossscale.jax.leaf_flags and bad_leaves, and check "
        "the backward pass in float32: gradients that are infinite at scale 1 are so "
        "at every scale."
    )
