# SPDX-License-Identifier: Apache-2.0
"""The gap: how far below the format's maximum the steps of a record overflowed.

A record has the largest gradient of the *weights*. Gradients inside the network may be
larger, and overflow first. How many bits first, the record itself shows: it has finite
steps, whose gradients were so and so many bits below the maximum, and overflows, of
which the steps around them tell about how many bits they were below it.
"""

from typing import NamedTuple

import numpy as np

from lossscale.diagnostics.sequences import Floats

_ALLOWED_SHARE = 0.1
"""A gap is still possible if it explains so much less of the overflows."""

_MOST_CANDIDATES = 2_000


class Gap(NamedTuple):
    """Bits between the largest gradient of the weights and an overflow."""

    least: float
    """The smallest gap with which the record agrees."""
    likely: float
    """The one with which it agrees best; the smallest, if there is nothing to tell."""
    most: float
    """The largest with which it agrees."""
    overflows: int
    """How many overflows it was found from."""
    explained: int
    """How many of them the likely gap explains."""


def find_gap(finite: Floats, overflows: Floats) -> Gap:
    """Return the gap with which a record agrees.

    A gap contradicts every finite step that was nearer to the maximum, and every
    overflow that was farther from it. The best gap contradicts the fewest steps. All
    that contradict one step more than that, or a tenth of the overflows, are possible.

    Args:
        finite: How many bits the largest gradient of each finite step was below the
            format's maximum.
        overflows: The same of each overflow, as the steps around it tell; negative if
            their gradients would have been above the maximum.
    """
    finite, overflows = np.sort(finite), np.sort(overflows)
    if not finite.size:
        return Gap(0.0, 0.0, 0.0, overflows.size, 0)
    gaps = _candidates(finite, overflows)
    contradicted = np.searchsorted(finite, gaps, side="left")
    unexplained = overflows.size - np.searchsorted(overflows, gaps, side="left")
    wrong = contradicted + unexplained
    best = np.flatnonzero(wrong == wrong.min())
    allowed = wrong.min() + max(1, int(_ALLOWED_SHARE * overflows.size))
    possible = np.flatnonzero(wrong <= allowed)
    # Overflows that need a gap bound it from below, finite steps from above.
    first, last = gaps[best[0]], gaps[best[-1]]
    likely = first if first == 0.0 else (first + last) / 2
    return Gap(
        least=float(gaps[possible[0]]),
        likely=float(likely),
        most=float(gaps[possible[-1]]),
        overflows=overflows.size,
        explained=int(np.searchsorted(overflows, likely, side="left")),
    )


def _candidates(finite: Floats, overflows: Floats) -> Floats:
    """Return gaps to try: none, just above each overflow, and at each finite step."""
    above = np.nextafter(overflows[overflows >= 0.0], np.inf)
    # A gap beyond the finite steps nearest to the maximum contradicts all of these.
    near = finite[(finite >= 0.0)][: _MOST_CANDIDATES // 2]
    above = above[: _MOST_CANDIDATES // 2]
    return np.unique(np.concatenate([[0.0], above, near]))
