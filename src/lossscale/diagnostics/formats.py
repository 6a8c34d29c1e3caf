# SPDX-License-Identifier: Apache-2.0
"""The ranges of the number formats that gradients are stored in.

An exponent here is that of a magnitude's leading bit: `floor(log2(magnitude))`. Imports
the standard library only.
"""

import math
from typing import NamedTuple

from lossscale.core.headroom import LARGEST


class NumberFormat(NamedTuple):
    """The range of a floating-point format, as exponents of its magnitudes."""

    largest: float
    """The largest number."""
    smallest_normal: int
    """The exponent of the smallest normal number."""
    smallest: int
    """The exponent of the smallest subnormal number."""

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest number."""
        return math.frexp(self.largest)[1] - 1


FORMATS = {
    "float16": NumberFormat(LARGEST["float16"], -14, -24),
    "bfloat16": NumberFormat(LARGEST["bfloat16"], -126, -133),
    "float8_e5m2": NumberFormat(57344.0, -14, -16),
    "float8_e4m3": NumberFormat(448.0, -6, -9),
    "float32": NumberFormat(LARGEST["float32"], -126, -149),
    "float64": NumberFormat(LARGEST["float64"], -1022, -1074),
}
"""Every format that a record may name, by name."""


def headroom(largest_magnitude: float, scale: float, dtype: str) -> float | None:
    """Return how often a step's gradients could double before they overflow.

    Args:
        largest_magnitude: That of the unscaled gradients.
        scale: The scale that they were multiplied by.
        dtype: The format in which they were stored.

    Returns:
        The distance in bits (log2); `None` if there is no finite one, as for zero.

    Example:
        >>> from lossscale.diagnostics.formats import headroom
        >>> round(headroom(0.25, 65536.0, "float16"), 2)
        2.0
    """
    stored = largest_magnitude * scale
    if not 0.0 < stored < math.inf:
        return None
    # Logarithms, not a quotient: float64's largest number over a small one is infinite.
    return math.log2(FORMATS[dtype].largest) - math.log2(stored)
