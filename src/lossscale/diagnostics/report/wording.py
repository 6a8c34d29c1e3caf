# SPDX-License-Identifier: Apache-2.0
"""Numbers as a person reads them."""

import re
from math import frexp, isfinite, isnan

NOTHING = "\u2013"
"""Shown where there is no number: a dash."""

SPACE = "\u00a0"
"""Between a number and its unit: no line is broken there."""

_THOUSAND = 1e3
_LONG = 1e8
_SUPERSCRIPTS = str.maketrans(
    "-0123456789", "\u207b\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079"
)
_SMALL = 1e-3
_HALF = 0.5


def encodable(text: str) -> str:
    """Return text that UTF-8 can hold; a name may have half a character in it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def number(value: float | None) -> str:
    """Return a number: whole ones with commas, powers of two that are long as such."""
    if value is None:
        return NOTHING
    try:
        return _number(float(value))
    except OverflowError:  # a whole number of more than 308 digits
        return "over 1e308" if value > 0 else "under -1e308"


def _number(value: float) -> str:
    if not isfinite(value):
        return "NaN" if isnan(value) else f"{value:f}"
    if value.is_integer() and abs(value) < _LONG:
        return f"{int(value):,}"
    mantissa, exponent = frexp(value)
    long = abs(value) >= _LONG or abs(value) < _SMALL
    if long and mantissa == _HALF:
        return f"2{str(exponent - 1).translate(_SUPERSCRIPTS)}"
    if _THOUSAND <= abs(value) < _LONG:
        return f"{value:,.0f}"
    return re.sub(r"e([-+])0*(\d)", _shorten_exponent, f"{value:.4g}")


def _shorten_exponent(found: "re.Match[str]") -> str:
    """Return e-5 for e-05, and e12 for e+12."""
    sign, digit = found.groups()
    return f"e{sign if sign == '-' else ''}{digit}"


def percent(share: float) -> str:
    """Return a share as per cent, with enough digits to tell it from nothing."""
    hundred = 100 * share
    if hundred == 0:
        return f"0{SPACE}%"
    if 0 < hundred < 0.01:  # noqa: PLR2004
        return f"< 0.01{SPACE}%"
    digits = 2 if 0 < hundred < 1 else 1
    return f"{hundred:.{digits}f}{SPACE}%"


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds, the largest two of them."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours:,} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole % 60} s"
    return f"{seconds:.1f} s"
