# SPDX-License-Identifier: Apache-2.0
"""How large an unscaled gradient may be.

A finite gradient can still become infinite on its way into the weights: replicas are
summed, micro-batches are accumulated, norms are sums of squares, a float16 variable
ends at 65504. Keras looks for infinities before all that and writes whatever comes out.
Here a gradient beyond what the rest of the step can hold counts as an overflow. The
bounds are numbers that are known before the step, so looking at them costs nothing.
"""

import math
from typing import Any

from lossscale.keras.operations import LARGEST, NARROW

_LINEAR = frozenset({"SGD", "Lion"})
"""Keras's optimizers that never square a gradient; backends subclass them."""


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
        limit = own = LARGEST[gradient]
        if not self.takes_wide:
            limit = min(own, LARGEST.get(variable, own))
        by_norm = bool(inner.clipnorm or inner.global_clipnorm)
        if by_norm or _squares(inner):
            # Moments are squares of one number each. In float32 there is room enough
            # to bound their sum as well, which some optimizers take; in float16 not.
            terms = 1 if gradient in NARROW and not by_norm else self._elements
            limit = min(limit, math.sqrt(own / terms))
        return limit / (self._replicas * (inner.gradient_accumulation_steps or 1))


def _clips(inner: Any) -> bool:
    """Whether an optimizer clips gradients, in whatever way."""
    return bool(inner.clipnorm or inner.global_clipnorm or inner.clipvalue)


def _squares(inner: Any) -> bool:
    """Whether an optimizer squares gradients as they come.

    An infinite second moment never comes back: its weight stands still for ever (Adam)
    or is NaN (Adafactor). An optimizer that we do not know is taken to square.
    """
    names = {base.__name__ for base in type(inner).__mro__}
    return not inner.clipvalue and names.isdisjoint(_LINEAR)
