# SPDX-License-Identifier: Apache-2.0
"""How large an unscaled gradient may be.

A finite gradient can still become infinite on its way into the weights: replicas are
summed, micro-batches are accumulated, norms are sums of squares, a float16 variable
ends at 65504. Keras looks for infinities before all that and writes whatever comes out.
Here a gradient beyond what the rest of the step can hold counts as an overflow. The
bounds are numbers that are known before the step, so looking at them costs nothing.
"""

from typing import Any

from lossscale.core.headroom import (
    LARGEST,
    accumulated,
    clip,
    largest_addend,
    largest_moment,
    largest_square_root,
)


class Headroom:
    """What an inner optimizer can hold, of one gradient."""

    def __init__(self, inner: Any, elements: int, replicas: int = 1) -> None:
        """Look at an inner optimizer as it is now.

        Args:
            inner: The optimizer; of a `MultiOptimizer` the tightest bound holds.
            elements: How many numbers it updates; a global norm sums all of them.
            replicas: How many replicas are summed.
        """
        self._optimizers = getattr(inner, "optimizers", None) or [inner]
        self._elements = max(1, elements)
        self._replicas = replicas
        self._known: dict[tuple[str, str], float] = {}
        self.takes_wide = all(
            clip(each) > 0.0 and accumulated(each) == 1 for each in self._optimizers
        )
        """Whether gradients may be wider than their variables. Clipping comes before
        the cast to the variable's dtype; an accumulator has that dtype and takes no
        other."""

    def largest(self, variable: str, gradient: str) -> float:
        """Return the largest magnitude that is safe, given two dtypes."""
        key = (variable, gradient)
        if key not in self._known:
            bounds = [self._bound(each, *key) for each in self._optimizers]
            self._known[key] = min(bounds)
        return self._known[key]

    def _bound(self, inner: Any, variable: str, gradient: str) -> float:
        """Return the bound of one optimizer."""
        addends = self._replicas * accumulated(inner)
        root = largest_square_root(inner, gradient, self._elements)
        limit = min(largest_addend(gradient, addends), root / addends)
        if LARGEST.get(variable, LARGEST[gradient]) < LARGEST[gradient]:
            # Clipped in the gradient's dtype, then cast to the variable's: safe if what
            # it is clipped to fits there, else as if it were not clipped.
            held = largest_moment(inner, variable)
            if not 0.0 < clip(inner) <= held:
                limit = min(limit, held / addends)
        return limit
