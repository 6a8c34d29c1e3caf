# SPDX-License-Identifier: Apache-2.0
"""What the last step did."""

from typing import NamedTuple

from lossscale.core.state import Array


class LastStep(NamedTuple):
    """Facts about the last step, left on the device: reading one copies it.

    `float()`, `int()` and `bool()` read a value; on a GPU each waits for the device.

    Example:
        >>> import keras
        >>> from lossscale.keras import LossScaleOptimizer
        >>> LossScaleOptimizer(keras.optimizers.SGD()).last_step.scale
        32768.0
    """

    skipped: Array
    """Whether the step was skipped, because a gradient was not finite; a boolean."""
    scale: Array
    """The scale that the step used; float32. `dynamic_scale` is the next step's."""
    good: Array
    """Clean steps counted towards the next growth, after the step; an integer."""
    bad: Array
    """Overflows counted towards the next back-off, after the step; an integer."""
    skipped_steps: Array
    """Steps skipped since the optimizer was built, files included; an integer."""
    consecutive_skips: Array
    """Steps skipped in a row up to now, 0 after a step that was taken; an integer."""
