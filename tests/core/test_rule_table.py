"""Every transition of small configurations, against a table written from the spec.

The table below is the contract of tf.contrib's manager and of DynamicLossScale, given
with plain branches in exact arithmetic: every number here has a few binary digits, so
that Python's floats hold each product. It was written from the specification and shares
nothing with core/rule.py.
"""

from itertools import product

import numpy as np
import pytest

import lossscale.numpy as ls
from lossscale import Dynamic, ScaleState, Signal

LARGEST = 2.0**20
"""A cap that the small configurations reach."""


def from_the_table(policy: Dynamic, scale, good, bad, finite):  # noqa: PLR0911
    """Return the next (scale, good, bad) by the written contract."""
    if finite:
        due = policy.growth_interval + (policy.growth_delay != "never")
        kept_bad = 0 if policy.consecutive_overflows else bad
        if good + 1 < due:
            return scale, good + 1, kept_bad
        restart = 1 if policy.growth_delay == "first" else 0
        larger = scale * policy.growth_factor
        if larger <= policy.max_scale:
            if policy.at_min == "hold" and larger < policy.min_scale:
                return scale, restart, 0
            return larger, restart, 0
        if policy.at_max == "clamp":
            return policy.max_scale, restart, 0
        return scale, restart, 0
    if bad + 1 < policy.hysteresis:
        return scale, 0, bad + 1
    smaller = (
        scale / policy.backoff_divisor
        if policy.backoff_divisor is not None
        else scale * policy.backoff_factor
    )
    left = 0 if policy.backoff_resets_hysteresis else bad + 1
    if smaller >= policy.min_scale:
        return smaller, 0, left
    if policy.at_min == "hold":
        return scale, 0, left
    return policy.min_scale, 0, left


def configurations():
    """Every combination of switches with small numbers."""
    numbers = ((2.0, 0.5), (4.0, 0.25), (2.0, 0.75))
    for at_min, at_max, late, consecutive, refills, divides, pair in product(
        ("clamp", "hold"),
        ("hold", "clamp"),
        ("never", "first", "always"),
        (False, True),
        (False, True),
        (False, True),
        numbers,
    ):
        up, down = pair
        backoff = {"backoff_divisor": up} if divides else {"backoff_factor": down}
        for interval, hysteresis in product((1, 2, 3), (1, 2, 3)):
            yield Dynamic(
                init_scale=8.0,
                growth_factor=up,
                growth_interval=interval,
                hysteresis=hysteresis,
                min_scale=1.0,
                max_scale=LARGEST,
                at_min=at_min,
                at_max=at_max,
                growth_delay=late,
                consecutive_overflows=consecutive,
                backoff_resets_hysteresis=refills,
                **backoff,
            )


# Values just inside, at and outside the bounds; all of them and their products with
# the factors above are float32 numbers, so the comparison is exact.
SCALES = (0.25, 0.5, 1.0, 1.5, 2.0, 8.0, 2.0**18, 2.0**19, 1.5 * 2**19, 2.0**20)


@pytest.mark.slow
@pytest.mark.parametrize("finite", [True, False])
def test_every_transition_is_that_of_the_table(finite):
    checked = 0
    states = list(product(SCALES, range(5), range(4)))
    scales, goods, bads = (np.array(column) for column in zip(*states, strict=True))
    # The rule is elementwise: all states of a configuration are one call.
    together = ScaleState(
        scales.astype(np.float32), goods.astype(np.int32), bads.astype(np.int32)
    )
    for policy in configurations():
        after = ls.update(policy, together, Signal(np.full(len(states), finite)))
        actual = zip(*(column.tolist() for column in after), strict=True)
        expected = [from_the_table(policy, *state, finite) for state in states]
        for before, wanted, found in zip(states, expected, actual, strict=True):
            assert wanted == found, (policy, before, finite)
            checked += 1
    assert checked == 288 * 9 * 200
