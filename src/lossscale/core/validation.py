# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, made at construction: one clear error, not at step 40,000.

Each check returns the value as a plain Python number, so that settings stay hashable
and can be written as JSON whatever kind of number the caller had.
"""

import math
import struct
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from lossscale.core.state import Signal, is_state
from lossscale.errors import (
    GradientError,
    SettingError,
    SettingTypeError,
    StateError,
)

FLOAT32_MAX = float.fromhex("0x1.fffffep+127")
"""The largest float32 number."""

_ROUNDED_TO_MAX = float.fromhex("0x1.ffffffp+127")
"""Numbers below it round to a float32 number, such as 3.4028235e38."""

SMALLEST_NORMAL = 2.0**-126
"""The smallest normal float32 number. Its reciprocal is finite."""


def as_float32(value: float) -> float:
    """Round to float32, the precision in which scales are kept.

    Raises:
        OverflowError: If the value is beyond float32.
    """
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def format_value(value: Any) -> str:
    """Format a value for a message: at most some 200 characters.

    Python refuses to write integers of more than 4,300 digits.
    """
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def name_type(value: Any) -> str:
    """Return what the caller would call the type of a value, such as "JAX array"."""
    name = type(value).__name__
    if name.endswith("Tracer"):
        return "JAX array"
    return _TYPE_NAMES.get(name, name)


def describe_type(value: Any) -> str:
    """Return the type of a value with its article, such as "an int"."""
    name = name_type(value)
    return f"{'an' if name[:1] in set('AEIOUaeiou') else 'a'} {name}"


_TYPE_NAMES = {
    "ArrayImpl": "JAX array",
    "ndarray": "NumPy array",
    "EagerTensor": "TensorFlow tensor",
}
"""What libraries call the types of their arrays themselves."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean ...?" for an unknown name, or an empty string."""
    from difflib import get_close_matches  # noqa: PLC0415  # only an error needs it

    close = get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


_MOST_BITS = 200
_MOST_CHARACTERS = 200


def check_number(name: str, value: Any, expected: str) -> float:
    """Return `value` as a finite float; a bool, a string or NaN is an error."""
    if isinstance(value, bool) or not isinstance(value, Real):
        message = (
            f"{name} must be {expected}, got {format_value(value)} "
            f"({type(value).__name__})."
        )
        raise SettingTypeError(message)
    try:
        result = float(value)
    except OverflowError:  # an integer beyond float64
        result = math.inf
    if not -_ROUNDED_TO_MAX < result < _ROUNDED_TO_MAX:  # NaN fails this as well
        message = f"{name} must be {expected}, got {format_value(value)}."
        raise SettingError(message)
    return max(-FLOAT32_MAX, min(result, FLOAT32_MAX))


def check_count(name: str, value: Any, unit: str = "steps") -> int:
    """Return `value` as an int of at least 1; `unit` says what it counts."""
    expected = f"a whole number of {unit}, 1 or more"
    if isinstance(value, bool) or not isinstance(value, Integral):
        message = (
            f"{name} must be {expected}, got {format_value(value)} "
            f"({type(value).__name__})."
        )
        raise SettingTypeError(message)
    result = int(value)
    # Counters are int32 in most frameworks.
    if not 1 <= result < 2**31 - 1:
        message = (
            f"{name} must be {expected} (and below 2**31 - 1), got "
            f"{format_value(value)}."
        )
        raise SettingError(message)
    return result


def check_window(name: str, value: Any) -> int:
    """Return `value` as a number of steps that float32 counts ten times over."""
    result = check_count(name, value)
    if result > _LONGEST_WINDOW:
        message = f"{name} must be at most {_LONGEST_WINDOW:,} steps, got {result:,}."
        raise SettingError(message)
    return result


_LONGEST_WINDOW = 10**6


def check_between(name: str, value: Any, low: float, high: float) -> float:
    """Return `value` if it lies between two numbers, or is one of them."""
    expected = f"a number from {low:g} to {high:g}"
    result = check_number(name, value, expected)
    if not low <= result <= high:
        message = f"{name} must be {expected}, got {format_value(value)}."
        raise SettingError(message)
    return result


def check_scale(name: str, value: Any) -> float:
    """Return `value` as a scale: positive, and finite with a finite reciprocal."""
    expected = "a positive float32 number from 2**-126 to 3.4028235e38"
    result = check_number(name, value, expected)
    if not SMALLEST_NORMAL <= result <= FLOAT32_MAX:
        message = f"{name} must be {expected}, got {format_value(value)}."
        raise SettingError(message)
    return result


def check_above_one(name: str, value: Any) -> float:
    """Return `value` if it is above 1 after rounding to float32."""
    expected = "a number above 1 (in float32), such as 2.0"
    result = check_number(name, value, expected)
    if not as_float32(result) > 1.0:
        message = f"{name} must be {expected}, got {format_value(value)}."
        raise SettingError(message)
    return result


def check_below_one(name: str, value: Any) -> float:
    """Return `value` if it lies between 0 and 1 after rounding to float32."""
    expected = "a number above 0 and below 1 (in float32), such as 0.5"
    result = check_number(name, value, expected)
    if not 0.0 < as_float32(result) < 1.0:
        message = f"{name} must be {expected}, got {format_value(value)}."
        raise SettingError(message)
    return result


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of the allowed words."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        expected = " or ".join(repr(word) for word in words)
        message = f"{name} must be {expected}, got {format_value(value)}."
        raise SettingError(message)
    return value


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        message = f"{name} must be True or False, got {format_value(value)}."
        raise SettingTypeError(message)
    return value


def require_signal(signal: Any) -> None:
    """Raise unless what an `update` was given is a `Signal`."""
    if not isinstance(signal, Signal):
        message = (
            "signal must be a Signal, such as unscale returns; got "
            f"{format_value(signal)}."
        )
        raise GradientError(message)


def require_state(state: Any, usage: str = "") -> None:
    """Raise unless this is a state: arguments of a step are easily swapped.

    Args:
        state: What a function was given as the state.
        usage: How else the adapter's functions take a state, as a sentence.
    """
    if is_state(state):
        return
    message = (
        f"The state is {describe_type(state)}, expected the ScaleState that "
        f"init(policy) or the previous step returned. {usage}It is the second argument "
        "of scale(loss, state), unscale(grads, state) and update(policy, state, "
        "signal)."
    )
    raise StateError(message)


def plain_number(value: Any) -> Any:
    """Return the Python number in an array of one element; anything else as it is."""
    if hasattr(value, "numpy") and not hasattr(value, "item"):  # TensorFlow's
        value = value.numpy()
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):  # more than one element
        return value
