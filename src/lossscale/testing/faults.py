# SPDX-License-Identifier: Apache-2.0
"""What `inject` writes, into which number of a tensor, and at which steps.

Every framework's `inject` takes these arguments and has them validated here. Imports
the core only.
"""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

from lossscale.core.headroom import LARGEST
from lossscale.core.validation import did_you_mean, format_value
from lossscale.errors import ContextError, SettingError, SettingTypeError

FaultValue: TypeAlias = str | float
"""One of `KINDS`, or a number."""

KINDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "huge": None}
"""The faults that have a name. "huge" is the largest finite number of the dtype."""


class Fault(NamedTuple):
    """What is written, and when."""

    value: FaultValue
    steps: tuple[int, ...]
    """In ascending order; the first step is 1."""
    element: int | None
    """Which number of the tensor, counted as in `ravel`; `None` for all of them."""

    @classmethod
    def check(cls, value: Any, steps: Any, element: Any) -> "Fault":
        """Return the fault that a caller describes, or raise."""
        return cls(_check_value(value), _check_steps(steps), _check_element(element))

    def number(self, name: str, dtype: str) -> float:
        """Return the number to write into a tensor of a dtype.

        Raises:
            SettingTypeError: If the dtype is not floating-point.
            SettingError: If the number is finite and the dtype cannot hold it.
        """
        if dtype not in LARGEST:
            message = (
                f"{name} is {dtype}, which holds no inf and no NaN; expected a tensor "
                f"of {', '.join(LARGEST)}."
            )
            raise SettingTypeError(message)
        if self.value == "huge":
            return LARGEST[dtype]
        number = KINDS[self.value] if isinstance(self.value, str) else self.value
        assert number is not None  # noqa: S101  # "huge" is above
        if math.isfinite(number) and abs(number) > LARGEST[dtype]:
            message = (
                f"{name} is {dtype}, whose largest number is {LARGEST[dtype]:g}; got "
                f"{number!r}. Write 'inf' for an infinity, or 'huge' for the largest "
                "number."
            )
            raise SettingError(message)
        return number

    def check_size(self, name: str, size: int) -> None:
        """Raise unless a tensor of this size has the element."""
        if size < 1 or (self.element is not None and self.element >= size):
            message = (
                f"{name} has {size} numbers, so there is no element {self.element}; "
                "elements are counted from 0, and None is all of them."
            )
            raise SettingError(message)

    def check_reached(self, name: str, count: int) -> None:
        """Raise if a test ended before the last fault was written."""
        missing = [step for step in self.steps if step > count]
        if missing:
            message = (
                f"The fault in {name} was to be written at steps {missing}, and there "
                f"were {count}. Take more steps inside the context, or leave these out."
            )
            raise ContextError(message)


def check_name(name: Any, names: Sequence[str], what: str) -> str:
    """Return a tensor's name if it is one of those that there are.

    Args:
        name: What the caller typed.
        names: The names that there are.
        what: What they are names of, in the plural.
    """
    if not isinstance(name, str):
        message = (
            f"The name must be a string, one of {format_value(list(names))}; got "
            f"{format_value(name)} ({type(name).__name__})."
        )
        raise SettingTypeError(message)
    if name not in names:
        message = (
            f"There is no {name!r} among the {what}: {format_value(list(names))}."
            f"{did_you_mean(name, names)}"
        )
        raise SettingError(message)
    return name


def _check_value(value: Any) -> FaultValue:
    expected = f"{', '.join(map(repr, KINDS))} or a number"
    if isinstance(value, str):
        if value not in KINDS:
            message = (
                f"The fault must be {expected}, got {format_value(value)}."
                f"{did_you_mean(value.lower(), KINDS)}"
            )
            raise SettingError(message)
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        message = (
            f"The fault must be {expected}, got {format_value(value)} "
            f"({type(value).__name__})."
        )
        raise SettingTypeError(message)
    return float(value)


def _check_steps(steps: Any) -> tuple[int, ...]:
    values = [steps] if isinstance(steps, Integral) else steps
    expected = "a step or several, such as 3 or [3, 5]; the first step is 1"
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        message = (
            f"steps must be {expected}; got {format_value(steps)} "
            f"({type(steps).__name__})."
        )
        raise SettingTypeError(message)
    result = list(values)
    for step in result:
        if isinstance(step, bool) or not isinstance(step, Integral):
            message = (
                f"steps must be {expected}; got {format_value(step)} "
                f"({type(step).__name__})."
            )
            raise SettingTypeError(message)
    if not result or not all(1 <= int(step) < 2**31 for step in result):
        message = f"steps must be {expected}; got {format_value(steps)}."
        raise SettingError(message)
    return tuple(sorted({int(step) for step in result}))


def _check_element(element: Any) -> int | None:
    if element is None:
        return None
    expected = "which number of the tensor, from 0, or None for all of them"
    if isinstance(element, bool) or not isinstance(element, Integral):
        message = (
            f"element must be {expected}; got {format_value(element)} "
            f"({type(element).__name__})."
        )
        raise SettingTypeError(message)
    if int(element) < 0:
        message = f"element must be {expected}; got {format_value(element)}."
        raise SettingError(message)
    return int(element)
