# SPDX-License-Identifier: Apache-2.0
"""Constructor arguments of the classic classes, as liberal as the originals were.

The originals took a bool for a number, and any period below 1 for 1. We take them
too. NaN, infinities, zero and negative scales, which the originals let through to
break training later, are errors here.
"""

from numbers import Integral, Real
from typing import Any

from lossscale.core import validation
from lossscale.core.validation import format_value, plain_number
from lossscale.errors import SettingError, SettingTypeError


def real_number(name: str, value: Any) -> float:
    """Return a number of any kind as a float: Python's, NumPy's, a bool, a scalar."""
    value = plain_number(value)
    if not isinstance(value, Real):
        message = (
            f"{name} must be a number, got {format_value(value)} "
            f"({type(value).__name__})."
        )
        raise SettingTypeError(message)
    number = int(value) if isinstance(value, bool) else value
    return validation.check_number(name, number, "a finite float32 number")


def whole_number(name: str, value: Any) -> int:
    """Return a number of steps; below 1 acts as 1, as it did in the originals."""
    if not isinstance(value, Integral):
        message = (
            f"{name} must be a whole number of steps, got {format_value(value)} "
            f"({type(value).__name__})."
        )
        raise SettingTypeError(message)
    return validation.check_count(name, max(1, int(value)))


def fixed_scale(name: str, value: float) -> float:
    """Return a fixed loss scale if it is 1 or more, as the originals demand."""
    if not value >= 1.0:
        message = f"{name} must be a number of 1 or more, got {value!r}."
        raise SettingError(message)
    return value
