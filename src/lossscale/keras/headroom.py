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
    largest_addend,
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
            _clips(each) and not each.gradient_accumulation_steps
            for each in self._optimizers
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
        own = gradient
        if not self.takes_wide and LARGEST.get(variable, LARGEST[own]) < LARGEST[own]:
            own = variable
        addends = self._replicas * accumulated(inner)
        root = largest_square_root(inner, gradient, self._elements)
        return min(largest_addend(own, addends), root / addends)


def _clips(inner: Any) -> bool:
    """Whether an optimizer clips gradients, in whatever way."""
    return bool(inner.clipnorm or inner.global_clipnorm or inner.clipvalue)
