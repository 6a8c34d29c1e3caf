# SPDX-License-Identifier: Apache-2.0
"""What a recorder is given: validated, as numbers that the host has."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from lossscale.core import validation
from lossscale.core.state import Signal
from lossscale.core.validation import format_value, plain_number
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


def cause_of(signal: Signal) -> str:
    """Return why a step was skipped, as far as its signal says."""
    if signal.loss_finite is not None and not bool(plain_number(signal.loss_finite)):
        return "loss"
    if signal.too_large is not None and bool(plain_number(signal.too_large)):
        return "headroom"
    return "nan" if signal.nan is not None and bool(plain_number(signal.nan)) else "inf"
