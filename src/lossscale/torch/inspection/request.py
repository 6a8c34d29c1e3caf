# SPDX-License-Identifier: Apache-2.0
"""What an inspection measures, and the numbers that it compares with."""

import math
from typing import NamedTuple

import torch

from lossscale.core.headroom import LARGEST

LIMITS: dict[torch.dtype, float] = {
    getattr(torch, name): largest for name, largest in LARGEST.items()
}
"""The largest number of each dtype that a gradient may have."""

EPSILON = 1e-6
"""What torch adds to a norm before it divides by it."""


class InspectionRequest(NamedTuple):
    """What to measure about the gradients of one optimizer, and what to do to them."""

    unscale_in_place: bool = False
    """Multiply the gradients by the inverse scale; not together with clipping."""
    max_norm: float = math.inf
    """The norm to clip to; infinity for no clipping."""
    clipped_later: float = math.inf
    """The norm that a group will be clipped to when the norm of all groups is known."""
    norm_type: float = 2.0
    """2 or infinity."""
    measure_norm: bool = False
    """Measure the norm even if nothing is clipped to it."""
    measure_amax: bool = False
    """Measure the largest magnitude of each tensor even if all of them are finite."""
    as_grad_scale: bool = False
    """The optimizer divides by the resulting `grad_scale`, a float32 number."""
    check_headroom: bool = True
    """Compare unscaled gradients with what the optimizer can hold."""

    @property
    def wants_norm(self) -> bool:
        """Whether the norm is needed."""
        return self.measure_norm or self.max_norm < math.inf

    def compares_with(self, smallest_bound: float) -> bool:
        """Whether gradients must be compared with bounds of headroom.

        Gradients that are clipped to less than every bound cannot exceed one.
        """
        return (
            self.check_headroom
            and self.max_norm > smallest_bound
            and self.clipped_later > smallest_bound
        )

    def for_group(self) -> "InspectionRequest":
        """Return the request for one of several groups, which are clipped together."""
        return self._replace(
            max_norm=math.inf,
            clipped_later=self.max_norm,
            measure_norm=self.wants_norm,
            measure_amax=True,
        )
