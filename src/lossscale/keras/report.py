# SPDX-License-Identifier: Apache-2.0
"""The report of the last step."""

from typing import NamedTuple

from keras import ops

from lossscale.core.state import Array
from lossscale.keras.gradients import REASONS


class StepReport(NamedTuple):
    """What became of the last step, left on the device: reading a value copies it.

    `float()`, `int()` and `bool()` read a value; on a GPU each waits for the device, as
    the properties `reason` and `nonfinite` do.

    Example:
        >>> import keras
        >>> from lossscale.keras import LossScaleOptimizer
        >>> LossScaleOptimizer(keras.optimizers.SGD()).last_step.scale
        32768.0
    """

    skipped: Array
    """Whether the step was skipped; a boolean."""
    scale: Array
    """The scale that the step used; float32. `dynamic_scale` is the next step's."""
    good_steps: Array
    """Finite steps counted towards the next growth, after the step; an integer."""
    bad_steps: Array
    """Overflows counted towards the next back-off, after the step; an integer."""
    skipped_steps: Array
    """Steps skipped since the optimizer was built, files included; an integer."""
    consecutive_skips: Array
    """Steps skipped in a row up to now, 0 after an applied step; an integer."""
    reasons: Array = ()
    """Why the last skipped step was skipped, a number for each variable: 0 (its
    gradient was not the reason), 1 (infinite), 2 (NaN), 3 (finite, and too large for
    the optimizer)."""
    names: tuple[str, ...] = ()
    """The variables' paths, in the same order."""

    @property
    def reason(self) -> str | None:
        """Why the step was skipped: "nan", "inf" or "headroom"; `None` if it was not.

        "headroom" if every gradient was finite, and one too large for the optimizer to
        square (or, with SGD and Lion, to add up). Then the scale has stayed: no lower
        one would help.
        """
        if not bool(self.skipped):
            return None
        reasons = set(self.nonfinite.values())
        return next((name for name in ("nan", "inf") if name in reasons), "headroom")

    @property
    def nonfinite(self) -> dict[str, str]:
        """The variables whose gradients were not finite, each with "inf" or "nan".

        If all were finite, those that were too large, each with "headroom".
        """
        if not bool(self.skipped):
            return {}
        numbers = ops.convert_to_numpy(self.reasons).tolist()
        reasons = {
            name: REASONS[number]
            for name, number in zip(self.names, numbers, strict=False)
            if number
        }
        nonfinite = {
            name: reason for name, reason in reasons.items() if reason != "headroom"
        }
        return nonfinite or reasons
