# SPDX-License-Identifier: Apache-2.0
"""Powers of two and logarithms by comparison and multiplication.

`where` and operators are all that frameworks share, so an exponent is found by seven
comparisons. Products and quotients with powers of two are exact.
"""

from lossscale.core.state import Array, Where

_POWERS = (64, 32, 16, 8, 4, 2, 1)


def round_up_to_power(ratio: Array, where: Where) -> Array:
    """Return the smallest power of two that is not below a ratio of at least 1."""
    power, mantissa, _ = _split(ratio, where)
    return where(mantissa > 1.0, power * 2.0, power)


def log2(value: Array, where: Where) -> Array:
    """Return the binary logarithm of a normal positive number, within 0.09.

    Exact for powers of two; in between the mantissa is taken as its logarithm, plus 1.
    """
    below_one = value < 1.0
    lifted = where(below_one, value * 2.0**126, value)
    _, mantissa, exponent = _split(lifted, where)
    exponent = where(below_one, exponent - 126.0, exponent)
    return exponent + (mantissa - 1.0)


def exp2_floor(exponent: Array, where: Where) -> Array:
    """Return 2**floor(exponent), held within 2**-126 and 2**127."""
    remainder = exponent + 126.0
    power = fill_like(remainder, 2.0**-126, where)
    remainder = where(remainder >= 0.0, remainder, 0.0)
    remainder = where(remainder <= _MOST, remainder, _MOST)
    for step in (126, *_POWERS):
        fits = remainder >= step
        power = where(fits, power * 2.0**step, power)
        remainder = where(fits, remainder - step, remainder)
    return power


_MOST = 126.0 + 127.0


def fill_like(value: Array, number: float, where: Where) -> Array:
    """Return a number in the kind and dtype of array that a finite value is."""
    return where(value == value, number, value)  # noqa: PLR0124  # all of them


def square_root(value: Array, where: Where) -> Array:
    """Return the root of a number of at least 0 by Newton's method.

    Correct to float32 from 2**-20 to 2**14; below, it is at most 2**-12 too large.
    """
    root = (value + 1.0) * 0.5
    for _ in range(_NEWTON_STEPS):
        root = (root + value / root) * 0.5
    return where(value > 0.0, root, 0.0)


_NEWTON_STEPS = 12


def _split(value: Array, where: Where) -> tuple[Array, Array, Array]:
    """Return the power of two below a number of at least 1, the rest, the exponent."""
    power, exponent = fill_like(value, 1.0, where), fill_like(value, 0.0, where)
    for step in _POWERS:
        fits = value >= 2.0**step
        power = where(fits, power * 2.0**step, power)
        exponent = where(fits, exponent + step, exponent)
        value = where(fits, value * 2.0**-step, value)
    return power, value, exponent
