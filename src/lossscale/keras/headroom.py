# SPDX-License-Identifier: Apache-2.0
"""How large an unscaled gradient may be.

A finite gradient can still become infinite on its way into the weights: replicas are
summed, micro-batches are accumulated, norms are sums of squares, a float16 variable
ends at 65504. Keras checks for infinities before all that, and writes the result. Here
a step is skipped if a gradient exceeds a bound. The bounds are numbers that are known
before the step, so comparing with them costs nothing.
"""

from collections.abc import Iterable
from typing import Any

from lossscale.core.headroom import (
    LARGEST,
    accumulation_steps,
    check_epsilon,
    clip_bound,
    largest_gradient,
)


class Headroom:
    """The largest gradients that an inner optimizer can process."""

    def __init__(self, inner: Any, elements: int, replicas: int = 1) -> None:
        """Read the settings of an inner optimizer as they are now.

        Args:
            inner: The optimizer; of a `MultiOptimizer` the tightest bound holds.
            elements: How many numbers it updates; a global norm sums all of them.
            replicas: How many replicas are summed.
        """
        self._optimizers = getattr(inner, "optimizers", None) or [inner]
        self._elements = max(1, elements)
        self._replicas = replicas
        self._bounds: dict[tuple[str, str], float] = {}
        self.accepts_wide = all(
            clip_bound(optimizer) > 0.0 and accumulation_steps(optimizer) == 1
            for optimizer in self._optimizers
        )
        """Whether gradients may be wider than their variables. Clipping comes before
        the cast to the variable's dtype; an accumulator has that dtype and takes no
        other."""

    def check_epsilon(self, dtypes: Iterable[str]) -> None:
        """Raise if one of the optimizers would divide by an epsilon of 0."""
        names = set(dtypes)
        for inner in self._optimizers:
            check_epsilon(inner, names)

    def largest(self, variable: str, gradient: str) -> float:
        """Return the largest magnitude that is safe, given two dtypes."""
        key = (variable, gradient)
        if key not in self._bounds:
            narrow = LARGEST.get(variable, LARGEST[gradient]) < LARGEST[gradient]
            dtype = variable if narrow and not self.accepts_wide else gradient
            self._bounds[key] = min(
                largest_gradient(
                    inner,
                    dtype,
                    variable,
                    elements=self._elements,
                    addends=self._replicas * accumulation_steps(inner),
                )
                for inner in self._optimizers
            )
        return self._bounds[key]
