# SPDX-License-Identifier: Apache-2.0
"""Which lower scales to try: a few, in jumps."""

import math
from collections.abc import Iterator

from lossscale.core.validation import SMALLEST_NORMAL

_MOST = 4
_JUMP = 2.0**4


def scales_to_try(scale: float, ratio: float | None) -> Iterator[float]:
    """Yield lower scales to run a batch at, until one is finite.

    Args:
        scale: The scale at which it was not.
        ratio: How many times the largest number of its format the first tensor was, if
            that is known: the first try leaves space for it twice over.
    """
    jump = _JUMP
    if ratio is not None and ratio > 1.0:
        jump = 2.0 ** (math.ceil(math.log2(ratio)) + 1)
    for number in range(_MOST):
        lower = scale / (jump * _JUMP**number)
        is_last = number == _MOST - 1
        if is_last and scale > 1.0:
            lower = min(lower, 1.0)
        if lower < SMALLEST_NORMAL:
            return
        yield lower
