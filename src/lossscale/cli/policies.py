# SPDX-License-Identifier: Apache-2.0
"""Policies as text: `torch`, `fixed:1024`, `dynamic:growth_interval=100,hysteresis=2`.

The name is a preset or the kind of a policy, as portable states have it; the settings
after the colon replace those of the preset. A policy that holds a rule takes the rule's
settings too: `headroom:margin=2,init_scale=1024`.
"""

import math
from collections.abc import Iterable
from dataclasses import fields
from itertools import product
from typing import Any

from lossscale import presets
from lossscale.core.policies import Dynamic, Fixed
from lossscale.core.portable import KINDS, SavedPolicy
from lossscale.core.validation import did_you_mean
from lossscale.errors import SettingError

_COUNTS = ("growth_interval", "hysteresis")
_SWITCHES = ("consecutive_overflows", "backoff_resets_hysteresis")
_RANGE_PARTS = 3
_MOST = 10_000


def parse_policy(text: str) -> SavedPolicy:
    """Return the policy that a text names.

    Raises:
        SettingError: If there is no such preset or setting, or its value is wrong.
    """
    name, _, settings = text.partition(":")
    if name == "fixed":
        value = settings.removeprefix("scale=")
        return Fixed(parse_number("scale", value)) if value else Fixed()
    values = parse_settings(text)
    if name == "dynamic":
        return presets.make_dynamic(Dynamic(), values)
    if name in presets.PRESETS:
        return presets.get(name, **values)
    if name in KINDS:
        return _make_data_policy(name, values)
    question = did_you_mean(name, [*KINDS, *presets.PRESETS])
    message = (
        f"There is no policy {name!r}; there are {', '.join(KINDS)} and the presets "
        f"{', '.join(presets.PRESETS)}.{question}"
    )
    raise SettingError(message)


def _make_data_policy(name: str, values: dict[str, Any]) -> SavedPolicy:
    """Return a policy that holds a rule, from settings of its own and of the rule."""
    chosen: Any = KINDS[name]
    plain = chosen()
    own_names = [field.name for field in fields(chosen) if field.name != "rule"]
    rule = [field.name for field in fields(Dynamic)]
    unknown = [key for key in values if key not in own_names and key not in rule]
    if unknown:
        question = did_you_mean(unknown[0], [*own_names, *rule])
        message = (
            f"{name} has no setting {unknown[0]!r}; its settings are "
            f"{', '.join([*own_names, *rule])}.{question}"
        )
        raise SettingError(message)
    settings = {
        key: _own_value(key, values[key], plain) for key in own_names if key in values
    }
    changed = {key: value for key, value in values.items() if key not in own_names}
    policy: SavedPolicy = chosen(
        rule=presets.make_dynamic(plain.rule, changed), **settings
    )
    return policy


def _own_value(key: str, text: Any, plain: Any) -> Any:
    """Return a setting of a data policy in the type of its default."""
    if key == "floors":
        return _floors(text)
    number = parse_number(key, text)
    # AutoStart's jump is a count that is None unless given.
    is_count = isinstance(getattr(plain, key), (int, type(None)))
    is_whole = is_count and number.is_integer()
    return int(number) if is_whole else number


def _floors(text: str) -> tuple[tuple[int | float, float], ...]:
    """Return a schedule: `floors=40000:8192+150000:32768`."""
    floors = []
    for part in text.split("+"):
        step, colon, scale = part.partition(":")
        if not colon:
            message = (
                f"floors is written step:scale+step:scale, such as "
                f"40000:8192+150000:32768, got {text!r}."
            )
            raise SettingError(message)
        number = parse_number("A step of floors", step)
        step_number = int(number) if number.is_integer() else number
        floors.append((step_number, parse_number("A scale of floors", scale)))
    return tuple(floors)


def parse_settings(text: str) -> dict[str, Any]:
    """Return the settings after the colon of a policy's text."""
    parts = text.partition(":")[2].split(",")
    settings = dict(_assignment(part) for part in parts if part)
    return {key: _value(key, value) for key, value in settings.items()}


def sweep(text: str, sweeps: Iterable[str]) -> dict[str, SavedPolicy]:
    """Return a policy for every combination of swept settings, by its text.

    A sweep is `growth_interval=100,200,400` or `growth_interval=100:2000:20`: from,
    to, and how many.
    """
    choices = [
        [f"{key}={value}" for value in _choices(key, values)]
        for key, values in map(_assignment, sweeps)
    ]
    if math.prod(map(len, choices)) > _MOST:
        message = f"A sweep makes at most {_MOST:,} policies; these make more."
        raise SettingError(message)
    policies: dict[str, SavedPolicy] = {}
    for combination in product(*choices):
        name, colon, settings = text.partition(":")
        parts = [part for part in (settings, *combination) if part]
        full = f"{name}:{','.join(parts)}" if parts else f"{name}{colon}"
        policies[full] = parse_policy(full)
    return policies


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        message = f"A setting is written name=value, got {text!r}."
        raise SettingError(message)
    return key.strip(), value.strip()


def _choices(key: str, text: str) -> list[str]:
    """Return the values of a sweep, as text."""
    parts = text.split(":")
    if len(parts) != _RANGE_PARTS:
        return text.split(",")
    first, last, count = (parse_number(key, part) for part in parts)
    if not (count.is_integer() and 1 <= count <= _MOST):
        message = f"A sweep tries 1 to {_MOST:,} values, got {parts[-1]!r}."
        raise SettingError(message)
    gaps = max(1, int(count) - 1)
    values = [first + (last - first) * index / gaps for index in range(int(count))]
    return [str(round(v)) if key in _COUNTS else repr(v) for v in values]


def _value(key: str, text: str) -> Any:
    """Return a setting's value in the type that the setting has."""
    if key not in {field.name for field in fields(Dynamic)}:
        return text  # the policy says which settings there are
    if key in _SWITCHES:
        words = {"true": True, "yes": True, "1": True}
        words |= {"false": False, "no": False, "0": False}
        return words.get(text.lower(), text)
    if key in _COUNTS:
        number = parse_number(key, text)
        return int(number) if number.is_integer() else number
    if key in {"at_min", "at_max", "growth_delay"}:
        return text
    return parse_number(key, text)


def parse_number(key: str, text: str) -> float:
    """Read a number; powers may be written 2**16."""
    base, power, exponent = text.partition("**")
    try:
        value = float(base) ** float(exponent) if power else float(text)
    except (ArithmeticError, ValueError):
        value = math.nan
    # A root of a negative number is complex.
    if not isinstance(value, float) or not math.isfinite(value):
        message = f"{key} must be a number such as 1024 or 2**16, got {text!r}."
        raise SettingError(message)
    return value
