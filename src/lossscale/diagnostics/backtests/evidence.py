# SPDX-License-Identifier: Apache-2.0
"""What a record shows that a recommendation can rest on."""

from typing import NamedTuple

import numpy as np

from lossscale.diagnostics.backtests.outcome import Material

EARLY = 100
"""How many finite steps the start of a run has."""

_SOON = 3
"""A skip within so many steps after a growth is counted as its consequence."""


class Evidence(NamedTuple):
    """What a record shows of a run's scale."""

    finite: int
    """How many steps were finite."""
    measured: int
    """How many of them have a largest magnitude."""
    skips: int
    """How many steps overflowed that a lower scale would have helped."""
    after_growth: int
    """How many of these came within three steps after a growth."""
    hopeless: int
    """How many steps no scale would have helped."""
    early_magnitude: float
    """The largest unscaled gradient of the first finite steps that were measured; NaN
    if none was."""
    early_limit: float
    """The largest scale at which all of the first finite steps probably are finite."""
    early_scale: float
    """The lowest scale of the first finite steps."""
    early_skips: int
    """How many steps overflowed before the first finite one."""


def collect_evidence(material: Material) -> Evidence:
    """Return what a record shows; it must have a finite step."""
    steps, limits = material.steps, material.limits
    finite = np.flatnonzero(steps.finite)
    early = finite[:EARLY]
    has_magnitude = ~np.isnan(steps.magnitudes)
    first = steps.magnitudes[early]
    helped = steps.overflows & ~limits.hopeless
    skips = np.flatnonzero(helped)
    grown = 1 + np.flatnonzero(np.diff(steps.scales) > 0)
    last_growth = np.append(grown, -steps.size)[
        np.searchsorted(grown, skips, side="right") - 1
    ]
    return Evidence(
        finite=finite.size,
        measured=int((steps.finite & has_magnitude).sum()),
        skips=skips.size,
        after_growth=int((skips - last_growth < _SOON).sum()),
        hopeless=int(limits.hopeless.sum()),
        early_magnitude=float(np.nanmax(first))
        if has_magnitude[early].any()
        else np.nan,
        early_limit=float(limits.likely[early].min()),
        early_scale=float(steps.scales[early].min()),
        early_skips=int((skips < finite[0]).sum()),
    )
