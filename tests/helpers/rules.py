"""Runs core/rule.py on a framework's arrays, against NumPy, over all switches."""

import random
from itertools import product

from helpers.sequences import overflow_pattern
from helpers.traces import replay
from lossscale import Dynamic, ScaleState, Signal


def policies():
    """A policy for every combination of switches, with odd factors."""
    for at_min, at_max, late, consecutive, refills, divides in product(
        ("clamp", "hold"),
        ("hold", "clamp"),
        ("never", "first"),
        (False, True),
        (False, True),
        (False, True),
    ):
        backoff = {"backoff_divisor": 3.0} if divides else {"backoff_factor": 0.8}
        yield Dynamic(
            init_scale=1000.0,
            growth_factor=1.7,
            growth_interval=2,
            hysteresis=2,
            min_scale=3.0,
            max_scale=1e5,
            at_min=at_min,
            at_max=at_max,
            growth_delay=late,
            consecutive_overflows=consecutive,
            backoff_resets_hysteresis=refills,
            **backoff,
        )


def run_rule(*, array, dtypes, where, compile_rule=None):
    """Raise unless every step equals NumPy's and dtypes stay what they are.

    Goes through `Policy.step`, as adapters do.

    Args:
        array: Makes an array of a number, with `dtype=`.
        dtypes: The framework's float32 and int32.
        where: The framework's select.
        compile_rule: Compiles a step, where the framework does that.
    """
    rng = random.Random(9)
    real, whole = dtypes
    for policy in policies():

        def step(scale, good, bad, finite, policy=policy):
            state, signal = ScaleState(scale, good, bad), Signal(finite)
            return tuple(policy.step(state, signal, where=where))

        taken = compile_rule(step) if compile_rule else step
        state = (
            array(policy.init_scale, dtype=real),
            array(0, dtype=whole),
            array(0, dtype=whole),
        )
        flags = overflow_pattern(rng, 40)
        for flag, expected in zip(flags, replay(policy, flags), strict=True):
            state = taken(*state, array(flag, dtype=None))
            actual = (float(state[0]), int(state[1]), int(state[2]))
            assert tuple(expected) == actual, policy
        assert [real, whole, whole] == [value.dtype for value in state]
