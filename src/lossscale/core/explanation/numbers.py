# SPDX-License-Identifier: Apache-2.0
"""Numbers as explanations write them."""

import math

_LONG = 1e8
_SMALL = 1e-3
"""Powers of two beyond these are written as such."""
_HALF = 0.5


def format_number(number: float) -> str:
    """Return a number as people read it: 65,536 and 2^40 rather than 1.09951e+12."""
    mantissa, exponent = math.frexp(number)
    is_plain = _SMALL <= abs(number) < _LONG
    if is_plain and number == round(number):
        return f"{round(number):,}"
    if mantissa == _HALF and not is_plain:
        return f"2^{exponent - 1}"
    return f"{number:,.6g}" if is_plain else f"{number:.4g}"
