# SPDX-License-Identifier: Apache-2.0
"""The steps that policies are run over: up to which scale each of them is finite."""

from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from lossscale.core import validation
from lossscale.core.headroom import LARGEST
from lossscale.errors import SettingError

Floats = npt.NDArray[np.float64]
Scales = npt.NDArray[np.float32]


class StepSequence(NamedTuple):
    """The steps of a simulation."""

    limits: Scales
    """The largest scale at which each step is finite: 0 if there is none."""
    magnitudes: Floats | None = None
    """The largest magnitude of each step's unscaled gradients; NaN where unknown."""

    @property
    def length(self) -> int:
        """How many steps there are."""
        return self.limits.size


def make_sequence(
    finite: npt.ArrayLike, magnitudes: npt.ArrayLike | None, dtype: str
) -> StepSequence:
    """Return the steps, checked; see `simulate` for the arguments.

    Raises:
        SettingError: If they are not what `simulate` takes.
    """
    flags = np.asarray(finite)
    if flags.ndim != 1 or flags.dtype != np.bool_:
        message = (
            "finite must be one row of booleans, one per step; got an array of "
            f"{flags.dtype} with shape {flags.shape}."
        )
        raise SettingError(message)
    largest = LARGEST[validation.check_choice("dtype", dtype, LARGEST)]
    replayed = np.where(flags, np.float32(np.inf), np.float32(0))
    if magnitudes is None:
        return StepSequence(replayed)
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
    limits = np.where(np.isnan(values), replayed, find_limits(values, largest))
    return StepSequence(limits, values)


def find_limits(values: Floats, largest: float) -> Scales:
    """Return the largest float32 scales at which magnitudes fit a format.

    Args:
        values: The magnitudes; NaN has no limit.
        largest: The largest number of the format.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        limits = (largest / values).astype(np.float32)
        # The quotient was rounded, twice; the product with a scale is exact.
        limits = np.where(limits * values > largest, next_scale(limits, 0), limits)
        higher = next_scale(limits, np.inf)
        return np.where(higher * values <= largest, higher, limits)


def next_scale(scales: Scales, towards: float) -> Scales:
    """Return the next float32 numbers above or below."""
    return cast("Scales", np.nextafter(scales, np.float32(towards)))
