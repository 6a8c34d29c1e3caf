"""Any valid rule, for property tests."""

from hypothesis import strategies as st

from lossscale import Dynamic
from lossscale.core.validation import FLOAT32_MAX, SMALLEST_NORMAL

TINY, HUGE = SMALLEST_NORMAL, FLOAT32_MAX


def float32s(low, high):
    return st.floats(low, high, width=32, allow_nan=False)


@st.composite
def policies(draw, *, powers_of_two=False):
    """Any valid policy, with bounds near both ends of float32 as often as not."""
    exponents = st.integers(-126, 127)
    if powers_of_two:
        low, first, high = sorted(2.0 ** draw(exponents) for _ in range(3))
        growth = 2.0 ** draw(st.integers(1, 6))
        backoff = draw(
            st.sampled_from(
                [{"backoff_factor": 1 / growth}, {"backoff_divisor": growth}]
            )
        )
    else:
        scales = float32s(TINY, HUGE)
        near_ends = st.sampled_from([TINY, 2 * TINY, HUGE / 2, HUGE, 1.0])
        low, first, high = sorted(draw(scales | near_ends) for _ in range(3))
        growth = draw(st.sampled_from([1.0000001, 1.7, 2.0, 3.0, 10.0, 1e10]))
        backoff = draw(
            st.sampled_from(
                [
                    {"backoff_factor": 0.8},
                    {"backoff_factor": 1e-10},
                    {"backoff_factor": 0.9999999},
                    {"backoff_divisor": 3.0},
                    {"backoff_divisor": 1.7},
                ]
            )
        )
    at_max = "hold" if powers_of_two else draw(st.sampled_from(["hold", "clamp"]))
    return Dynamic(
        init_scale=first,
        growth_factor=growth,
        growth_interval=draw(st.integers(1, 4)),
        hysteresis=draw(st.integers(1, 4)),
        min_scale=low,
        max_scale=high,
        at_min=draw(st.sampled_from(["clamp", "hold"])),
        at_max=at_max,
        growth_delay=draw(st.sampled_from(["never", "first", "always"])),
        consecutive_overflows=draw(st.booleans()),
        backoff_resets_hysteresis=draw(st.booleans()),
        **backoff,
    )
