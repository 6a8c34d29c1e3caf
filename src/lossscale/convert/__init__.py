# SPDX-License-Identifier: Apache-2.0
"""Scaler states of other libraries, read into ours and written from ours.

A library's state is taken as the plain mapping that the library itself hands out
(`state_dict()` and its like) or the JSON of it; nothing is unpickled. Most libraries
save less than their whole behaviour: what a mapping does not say comes from `policy`,
or else from the library's preset. Writing reports what the other library cannot keep.
"""

from collections.abc import Mapping
from dataclasses import asdict
from math import frexp
from typing import Any, NamedTuple

from lossscale import presets
from lossscale.convert.formats import (
    LIBRARIES,
    Library,
    Pair,
    Values,
    backoff_factor,
    override,
)
from lossscale.core.policies import Dynamic, Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState
from lossscale.core.validation import did_you_mean, format_value
from lossscale.errors import LossScaleError, StateError

__all__ = [
    "LIBRARIES",
    "Conversion",
    "detect_library",
    "from_library",
    "to_library",
    "with_scale",
]


class Conversion(NamedTuple):
    """A state in another library's form, and what that form cannot hold.

    Example:
        >>> from lossscale import Dynamic
        >>> from lossscale.convert import to_library
        >>> policy = Dynamic(hysteresis=2)
        >>> conversion = to_library("apex", policy, policy.init())
        >>> conversion.dropped[0]
        'hysteresis is 2 here, apex will take 1'
    """

    values: dict[str, Any]
    """The other library's mapping."""
    dropped: tuple[str, ...]
    """One line for each setting or counter that the other library does not keep."""


def from_library(library: str, values: Values, policy: Dynamic | None = None) -> Pair:
    """Read another library's scaler state.

    Args:
        library: One of `LIBRARIES`.
        values: The mapping that the library's `state_dict` (or its like) returned.
        policy: Settings that the mapping does not hold, such as Megatron's
            hysteresis; by default those of the library's preset.

    Raises:
        StateError: If the mapping is not that library's, or its scale has collapsed.

    Example:
        >>> from lossscale.convert import from_library
        >>> saved = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
        ...          "growth_interval": 2000, "_growth_tracker": 3}
        >>> from_library("torch", saved)[1]
        ScaleState(scale=1024.0, good_steps=3, bad_steps=0)
    """
    converter = _find(library)
    if not isinstance(values, Mapping):
        message = f"A state of {library} is a mapping, got {type(values).__name__}."
        raise StateError(message)
    missing = sorted(converter.keys - set(values))
    if missing:
        message = (
            f"This is not a state of {library}: {missing} are missing, there are "
            f"{sorted(map(str, values))}."
        )
        raise StateError(message)
    base = presets.get(converter.preset) if policy is None else policy
    if not isinstance(base, Dynamic):
        message = f"policy must be a Dynamic, got {base!r}."
        raise StateError(message)
    try:
        read_policy, state = converter.read(values, base)
        return read_policy, check_state(read_policy, state)
    except LossScaleError as error:
        message = f"The state of {library} is not usable: {error}"
        raise StateError(message) from error


def to_library(library: str, policy: Policy, state: ScaleState) -> Conversion:
    """Write a scaler state in another library's form.

    Raises:
        StateError: If the library cannot hold such a policy at all.

    Example:
        >>> from lossscale import Dynamic
        >>> from lossscale.convert import to_library
        >>> policy = Dynamic(hysteresis=2)
        >>> to_library("apex", policy, policy.init()).values
        {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    converter = _find(library)
    if not isinstance(policy, Dynamic):
        message = (
            f"Only dynamic scales can be converted to {library}, got "
            f"{format_value(policy)}. Pass a Dynamic."
        )
        raise StateError(message)
    state = check_state(policy, state)
    values = converter.write(policy, state)
    # Read it back as the other library would, and see what is not there any more.
    preset = presets.get(converter.preset)
    unsaved = {name: getattr(policy, name) for name in converter.unsaved}
    if unsaved.get("backoff_factor", 0) is None:
        unsaved["backoff_factor"] = backoff_factor(policy)
    base = override(preset, **unsaved)
    kept_policy, kept_state = from_library(library, values, base)
    ours = _comparable(policy, state)
    theirs = _comparable(kept_policy, kept_state)
    # No library saves the first scale; once training runs it has no further effect.
    dropped = [
        f"{name} is {ours[name]!r} here, {library} will take {theirs[name]!r}"
        for name in ours
        if name != "init_scale" and ours[name] != theirs[name]
    ]
    dropped += [
        f"{name} is {value!r} here, {library} does not save it: set it there"
        for name, value in unsaved.items()
        if value != getattr(preset, name)
    ]
    return Conversion(values, tuple(dropped))


def with_scale(library: str, values: Values, scale: float) -> dict[str, Any]:
    """Return another library's mapping, or our own, with another scale in it.

    A scale that collapsed to 0 or infinity cannot be read; this is the way out.

    Example:
        >>> from lossscale.convert import with_scale
        >>> with_scale("flax", {"scale": 0.0, "fin_steps": 3}, 65536.0)
        {'scale': 65536.0, 'fin_steps': 3}
    """
    keys = ("state", "scale") if library == "lossscale" else _find(library).scale
    return _replace_scale(values, keys, scale)


def _replace_scale(values: Any, keys: tuple[str, ...], scale: float) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        message = (
            f"A mapping with {keys[0]!r} was expected, got {format_value(values)}."
        )
        raise StateError(message)
    key, *inner_keys = keys
    inner = (
        _replace_scale(values.get(key), tuple(inner_keys), scale)
        if inner_keys
        else scale
    )
    return {**values, key: inner}


def detect_library(values: Values) -> str:
    """Return the name of the library whose mapping this is; "lossscale" for ours.

    Raises:
        StateError: If it fits none or several.

    Example:
        >>> from lossscale.convert import detect_library
        >>> detect_library({"fin_steps": 3, "scale": 8.0})
        'flax'
    """
    if not isinstance(values, Mapping):
        message = f"A scaler state is a mapping, got {type(values).__name__}."
        raise StateError(message)
    if str(values.get("format", "")).startswith("lossscale/"):
        return "lossscale"
    fitting = [
        name for name, library in LIBRARIES.items() if library.keys <= set(values)
    ]
    # TensorFlow and tf_keras keep the same two variables.
    if fitting == ["tensorflow", "tf_keras"]:
        return "tf_keras" if "dynamic_growth_steps" in values else "tensorflow"
    if len(fitting) == 1:
        return fitting[0]
    message = (
        f"The keys {sorted(map(str, values))} do not identify a library; name it: "
        f"{', '.join(LIBRARIES)}."
    )
    raise StateError(message)


def _find(library: str) -> Library:
    if not isinstance(library, str) or library not in LIBRARIES:
        message = (
            f"No converter for {library!r}; there are {', '.join(LIBRARIES)}."
            f"{did_you_mean(str(library), LIBRARIES)}"
        )
        raise StateError(message)
    return LIBRARIES[library]


def _comparable(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    """Return settings and state, with what comes to the same thing written alike."""
    settings = asdict(policy) | state._asdict()
    if not policy.backoff_resets_hysteresis:  # further overflows count for nothing
        settings["bad_steps"] = min(state.bad_steps, policy.hysteresis - 1)
    if policy.hysteresis == 1:  # nothing is ever counted
        settings |= {"consecutive_overflows": False, "backoff_resets_hysteresis": True}
    divisor = policy.backoff_divisor
    if divisor is not None and frexp(divisor)[0] == 0.5:  # noqa: PLR2004
        settings |= {"backoff_factor": 1.0 / divisor, "backoff_divisor": None}
    return settings
