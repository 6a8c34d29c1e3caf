# SPDX-License-Identifier: Apache-2.0
"""A scaler's state as one plain JSON object, the same for every framework.

    {"format": "lossscale/1",
     "policy": {"kind": "dynamic", "init_scale": 65536.0, ...},
     "state": {"scale": 32768.0, "good_steps": 17, "bad_steps": 0}}

A policy that holds a rule, such as `Headroom`, has the rule's settings as an object
inside its own, and what it remembers next to the three numbers of the state.

Reading parses JSON and nothing else: nothing is ever unpickled. An object that is
truncated, malformed, foreign or of a newer format gives one `StateError` and changes
nothing. Files are replaced atomically: a kill in the middle leaves the old file whole.
"""

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

from lossscale.core import validation
from lossscale.core.data_policies import (
    AutoStart,
    Headroom,
    Histogram,
    LogMax,
    OverflowRate,
    RisingFloor,
    Saturation,
    WindowFollowsScale,
)
from lossscale.core.policies import Dynamic, Fixed, Policy
from lossscale.core.state import ScaleState, State, is_state
from lossscale.core.validation import format_value
from lossscale.errors import LossScaleError, StateError

FORMAT = "lossscale/1"
"""The format that this version writes, and the newest that it reads."""

_COUNTER_END = 2**31 - 1
"""Counters are int32 in most frameworks, and the rule adds 1."""

SavedPolicy: TypeAlias = (
    Fixed
    | Dynamic
    | Headroom
    | LogMax
    | Histogram
    | Saturation
    | OverflowRate
    | WindowFollowsScale
    | RisingFloor
    | AutoStart
)
"""A policy that can be written."""

KINDS: dict[str, type[SavedPolicy]] = {
    "fixed": Fixed,
    "dynamic": Dynamic,
    "headroom": Headroom,
    "log_max": LogMax,
    "histogram": Histogram,
    "saturation": Saturation,
    "overflow_rate": OverflowRate,
    "window_follows_scale": WindowFollowsScale,
    "rising_floor": RisingFloor,
    "auto_start": AutoStart,
}
"""The name of each policy in files, and on the command line."""

STATE_CLASSES = tuple({type(policy().init()): None for policy in KINDS.values()})
"""The NamedTuples that their states are."""

Portable: TypeAlias = dict[str, Any]
"""The object described above."""


def to_portable(policy: Policy, state: ScaleState) -> Portable:
    """Return a policy and its state as one object of JSON types.

    On a GPU this waits for the device: a few numbers are copied to the host.

    Raises:
        StateError: If the policy is not one of ours, or the state is not one scale
            with two counters.

    Example:
        >>> from lossscale import Fixed, to_portable
        >>> policy = Fixed(1024.0)
        >>> to_portable(policy, policy.init())["state"]
        {'scale': 1024.0, 'good_steps': 0, 'bad_steps': 0}
    """
    for kind, policy_class in KINDS.items():
        if type(policy) is policy_class:
            settings = {"kind": kind, **asdict(policy)}
            break
    else:
        message = (
            f"A {type(policy).__name__} cannot be written: a portable state holds "
            "lossscale's own policies. Save the fields of your policy and the "
            "numbers of its state yourself."
        )
        raise StateError(message)
    checked = check_state(policy, state)
    return {"format": FORMAT, "policy": settings, "state": checked._asdict()}


def from_portable(portable: Mapping[str, Any]) -> tuple[SavedPolicy, ScaleState]:
    """Return the policy and the state, as Python numbers, of a portable object.

    Pass both to the `init` of a framework's module to continue training.

    Raises:
        StateError: If the object is malformed, foreign, or of a newer format.

    Example:
        >>> from lossscale import Fixed, from_portable, to_portable
        >>> policy = Fixed(1024.0)
        >>> from_portable(to_portable(policy, policy.init()))
        (Fixed(scale=1024.0), ScaleState(scale=1024.0, good_steps=0, bad_steps=0))
    """
    _check_format(portable)
    _check_keys("the object", portable, {"format", "policy", "state"})
    settings, values = portable["policy"], portable["state"]
    for name, entry in (("policy", settings), ("state", values)):
        if not isinstance(entry, Mapping):
            message = f"'{name}' must be an object, got {format_value(entry)}."
            raise StateError(message)
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        message = (
            f"The policy's kind must be {' or '.join(KINDS)}, got {format_value(kind)}."
        )
        raise StateError(message)
    policy = _parse_policy(KINDS[kind], settings, {"kind"})
    state_class = type(policy.init())
    _check_keys("the state", values, set(state_class._fields))
    return policy, check_state(policy, state_class(**values))


def _parse_policy(
    policy_class: type[Any], settings: Mapping[str, Any], other_keys: set[str]
) -> Any:
    """Return a policy made of its settings, and of those of its rule."""
    names = {field.name for field in fields(policy_class)}
    _check_keys("the policy", settings, names | other_keys)
    entries = {name: settings[name] for name in names}
    if "rule" in entries:
        if not isinstance(entries["rule"], Mapping):
            message = f"'rule' must be an object, got {format_value(entries['rule'])}."
            raise StateError(message)
        entries["rule"] = _parse_policy(Dynamic, entries["rule"], set())
    try:
        return policy_class(**entries)
    except LossScaleError as error:
        message = f"The policy is not usable: {error}"
        raise StateError(message) from error


def save(path: str | os.PathLike[str], policy: Policy, state: ScaleState) -> None:
    """Write a policy and its state to a JSON file, atomically.

    Example:
        >>> import os, tempfile
        >>> from lossscale import Fixed, load, save
        >>> policy = Fixed(8.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "scaler.json")
        ...     save(path, policy, policy.init())
        ...     load(path)
        (Fixed(scale=8.0), ScaleState(scale=8.0, good_steps=0, bad_steps=0))
    """
    text = json.dumps(to_portable(policy, state), indent=2, allow_nan=False) + "\n"
    write_atomically(path, text)


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file: the old one stays whole until the new one is on the disk.

    Links are followed. Devices and pipes are written to directly.

    Raises:
        OSError: If it cannot be written, or is a folder.
    """
    if Path(path).exists() and not Path(path).is_file():
        with Path(path).open("w", encoding="utf-8") as file:
            file.write(text)
        return
    target = Path(os.path.realpath(path))
    # Next to the target, since only a rename within a file system is atomic; and not
    # by tempfile, whose files are private, where an ordinary open() follows the umask.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # The caller does not know the temporary file: name the one it asked for.
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> tuple[SavedPolicy, ScaleState]:
    """Read a policy and its state from a file written by `save`.

    Raises:
        StateError: If the file does not hold a portable state.

    Example:
        >>> import os, tempfile
        >>> from lossscale import Dynamic, load, save
        >>> policy = Dynamic(growth_interval=500)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "scaler.json")
        ...     save(path, policy, policy.init())
        ...     loaded, state = load(path)
        >>> loaded == policy, state.scale
        (True, 65536.0)
    """
    return from_portable(read_json(path))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read one JSON object from a file.

    Raises:
        StateError: If the file cannot be read or holds something else.
    """
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read: {error}."
        raise StateError(message) from error
    return parse_json(text, str(path))


def parse_json(text: str | bytes, name: str) -> dict[str, Any]:
    """Return the one JSON object that a text holds; `name` says where it came from.

    Bytes may be UTF-8, UTF-16 or UTF-32, with a byte order mark or without.

    Raises:
        StateError: If it holds something else.
    """
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        message = f"{name} does not hold a JSON object: it is not text."
        raise StateError(message) from error
    except (ValueError, RecursionError) as error:
        message = f"{name} does not hold a JSON object: {error}."
        raise StateError(message) from error
    if not isinstance(value, dict):
        message = f"{name} holds {type(value).__name__}, expected a JSON object."
        raise StateError(message)
    return value


def _check_format(portable: Mapping[str, Any]) -> None:
    """Raise unless the object says that it is of a format we read."""
    if not isinstance(portable, Mapping):
        message = f"A portable state is an object, got {type(portable).__name__}."
        raise StateError(message)
    written = portable.get("format")
    if written == FORMAT:
        return
    name, _, number = str(written).partition("/")
    newer = number.isdecimal() and number.lstrip("0") not in ("", "1")
    if name == "lossscale" and newer:
        message = (
            f"This state has format {format_value(written)}, this version reads "
            f"{FORMAT!r}. Upgrade with: pip install --upgrade lossscale"
        )
    else:
        message = (
            f"This is not a lossscale state: 'format' is {format_value(written)}, "
            f"expected {FORMAT!r}. To read another library's state, use `lossscale "
            "convert` or lossscale.convert.from_library."
        )
    raise StateError(message)


def _check_keys(what: str, entries: Mapping[str, Any], expected: set[str]) -> None:
    """Raise unless the object has exactly the expected keys.

    A setting that a later version adds to a policy must be optional here: files of this
    version do not have it.
    """
    missing, unknown = expected - set(entries), set(entries) - expected
    if missing or unknown:
        message = (
            f"The keys of {what} are not those of a {FORMAT} state: missing "
            f"{sorted(missing)}, unknown {sorted(map(str, unknown))}."
        )
        raise StateError(message)


def check_state(policy: Policy, state: ScaleState) -> ScaleState:
    """Return a state as Python numbers, whatever arrays held it, if it can be used.

    The result is of the type that the policy has. What a policy remembers starts from
    its first state where the given one is of another type.

    Raises:
        StateError: If it is not one scale with two counters, or if the policy could
            never move it again.
    """
    if not is_state(state):
        message = f"A state is a ScaleState, got {format_value(state)}."
        raise StateError(message)
    values = {
        name: validation.plain_number(value) for name, value in state._asdict().items()
    }
    scale = values["scale"]
    if isinstance(scale, bool) or not isinstance(scale, Real):
        message = f"The scale must be one number, got {format_value(scale)}."
        raise StateError(message)
    try:
        scale = validation.check_scale("The scale", scale)
    except LossScaleError as error:
        raise StateError(str(error)) from None
    good_steps = _check_counter("good_steps", values["good_steps"])
    bad_steps = _check_counter("bad_steps", values["bad_steps"])
    if isinstance(policy, Fixed) and (
        validation.as_float32(scale) != validation.as_float32(policy.scale)
    ):
        message = (
            f"The scale is {scale!r}, and the policy is fixed at {policy.scale!r}."
        )
        raise StateError(message)
    rule = getattr(policy, "rule", policy)
    if isinstance(rule, Dynamic) and rule.is_stuck(scale):
        message = (
            f"The scale {scale!r} is so far below min_scale={rule.min_scale!r} that "
            "a policy with at_min='hold' could never move it."
        )
        raise StateError(message)
    first = policy.init()
    memory = _check_memory(first, values) if type(first) is type(state) else {}
    return first._replace(
        scale=scale, good_steps=good_steps, bad_steps=bad_steps, **memory
    )


def _check_counter(name: str, counter: Any) -> int:
    """Return a counter of a state as a Python integer."""
    if isinstance(counter, bool) or not isinstance(counter, Integral):
        message = (
            f"The counter '{name}' must be a whole number, got {format_value(counter)}."
        )
        raise StateError(message)
    if not 0 <= int(counter) < _COUNTER_END:
        message = (
            f"The counter '{name}' must be 0 or more and below 2**31 - 1, got "
            f"{format_value(counter)}."
        )
        raise StateError(message)
    return int(counter)


def _check_memory(first: State, values: Mapping[str, Any]) -> dict[str, float]:
    """Return what a policy remembers besides the three numbers, as Python floats."""
    names = first._fields[len(ScaleState._fields) :]
    expected = "a finite float32 number"
    try:
        return {
            name: validation.check_number(
                f"'{name}' in the state", values[name], expected
            )
            for name in names
        }
    except LossScaleError as error:
        raise StateError(str(error)) from None
