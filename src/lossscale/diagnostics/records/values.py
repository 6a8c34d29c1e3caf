# SPDX-License-Identifier: Apache-2.0
"""What a recorder is given: validated, as numbers that the host has."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from lossscale.core import validation
from lossscale.core.state import Signal, is_state
from lossscale.core.statistics import TensorStatistics
from lossscale.core.validation import format_value, plain_number
from lossscale.diagnostics.alarms import AlarmRules
from lossscale.diagnostics.loggers.base import StepWriter
from lossscale.diagnostics.records.steps import (
    CAUSES,
    Nonfinite,
)
from lossscale.errors import SettingError, SettingTypeError

Tensors: TypeAlias = Iterable[tuple[str, str]] | Mapping[str, str]
"""Tensors by name, each with "inf" or "nan"."""


def check_rank(rank: int | None) -> int:
    """Return a rank; by default that of the environment."""
    if rank is None:
        text = os.environ.get("RANK", "0")
        return int(text) if text.isdecimal() else 0
    return check_step(rank, "rank")


def check_step(value: Any, name: str = "step") -> int:
    """Return a whole number of 0 or more."""
    number = plain_number(value)
    if isinstance(number, bool) or not isinstance(number, int):
        message = (
            f"{name} must be a whole number, 0 or more, got {format_value(value)}."
        )
        raise SettingTypeError(message)
    if not 0 <= number < 2**53:
        message = (
            f"{name} must be a whole number, 0 or more, got {format_value(value)}."
        )
        raise SettingError(message)
    return number


def check_applied(value: Any, name: str = "applied") -> bool:
    """Return a boolean that the host has, or that it is given."""
    if isinstance(value, bool):
        return value
    flag = plain_number(value)
    if not isinstance(flag, bool):
        message = (
            f"{name} must be True or False, or an array of one boolean, got "
            f"{format_value(value)}."
        )
        raise SettingTypeError(message)
    return flag


def check_scale(value: Any) -> float:
    """Return a scale: one positive number."""
    number = check_number("scale", value)
    if number is None or not 0.0 < number < float("inf"):
        message = f"scale must be a positive number, got {format_value(value)}."
        raise SettingError(message)
    return number


def check_number(name: str, value: Any) -> float | None:
    """Return a measured number, which may be infinite or NaN."""
    if value is None or type(value) is float:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        message = f"{name} must be one number, got {format_value(value)}."
        raise SettingTypeError(message) from None


def check_tensors(nonfinite: Tensors) -> Nonfinite:
    """Return tensors as pairs of a name and a cause."""
    pairs = nonfinite.items() if isinstance(nonfinite, Mapping) else nonfinite
    try:
        return tuple(
            (str(n), validation.check_choice("cause", c, CAUSES)) for n, c in pairs
        )
    except (TypeError, ValueError):
        message = (
            'nonfinite must be pairs of a name and "inf" or "nan", got '
            f"{format_value(nonfinite)}."
        )
        raise SettingTypeError(message) from None


def check_statistics(statistics: Any) -> None:
    """Raise unless these are the statistics of tensors."""
    if not all(hasattr(statistics, name) for name in TensorStatistics._fields):
        message = (
            "statistics must be a TensorStatistics, such as measure_tensors(gradients) "
            f"returns, got {format_value(statistics)}."
        )
        raise SettingTypeError(message)


def check_alarms(alarms: Any) -> None:
    """Raise unless these are the rules of alarms, or none."""
    if alarms is not None and not isinstance(alarms, AlarmRules):
        message = (
            "alarms must be an AlarmRules, such as AlarmRules(backoffs=3), or None for "
            f"no alarms, got {format_value(alarms)}. Leave it out for the usual rules."
        )
        raise SettingTypeError(message)


def check_on_alarm(on_alarm: Any) -> None:
    """Raise unless this can be called with an alarm, or is none."""
    if on_alarm is not None and not callable(on_alarm):
        message = (
            "on_alarm must be a function of one Alarm, such as print, got "
            f"{format_value(on_alarm)}."
        )
        raise SettingTypeError(message)


def check_writers(writers: Any) -> tuple[StepWriter, ...]:
    """Return writers as a tuple; one that is not in a list is an error."""
    listed = tuple(writers) if isinstance(writers, Iterable) else (writers,)
    wrong = [each for each in listed if not _is_writer(each)]
    if wrong or not isinstance(writers, Iterable):
        given = format_value(wrong[0] if wrong else writers)
        message = (
            "writers must be a list of StepWriters, such as [LoggingWriter()], got "
            f"{given}{' in it' if isinstance(writers, Iterable) else ''}."
        )
        raise SettingTypeError(message)
    return listed


def _is_writer(value: Any) -> bool:
    methods = ("write_step", "write_alarm", "close")
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in methods
    )


def not_a_signal(state: Any, signal: Any) -> SettingTypeError:
    """Return what to raise if these are not the state and the signal of a step."""
    swapped = is_state(signal) and isinstance(state, Signal)
    found: SettingTypeError = SettingTypeError(
        "record_signal takes the ScaleState that the step used, then the Signal that "
        f"unscale returned; got {format_value(state)} and {format_value(signal)}."
        f"{' Write record_signal(state, signal).' if swapped else ''}"
    )
    return found


def cause_of(signal: Signal) -> str:
    """Return why a step was skipped, as far as its signal says."""
    if signal.loss_finite is not None and not bool(plain_number(signal.loss_finite)):
        return "loss"
    if signal.too_large is not None and bool(plain_number(signal.too_large)):
        return "headroom"
    return "nan" if signal.nan is not None and bool(plain_number(signal.nan)) else "inf"
