# SPDX-License-Identifier: Apache-2.0
"""The lines of a recorded run: how each is written, and read again.

    {"format":"lossscale-run/1","run":"5f0c...","columns":[...],"names":[...], ...}
    [1,0.012,65536,1,0.5312,1,0.0021,2.31,0.0003]
    [2,0.024,65536,0,"inf",1,null,2.30,0.0003,"inf",{"inf":[[0,11]],"nan":[12]},13]
    {"statistics":{"step":51,"scale":32768,"tensors":[...],"updates":[...]}}

The first line is the header. A line that is an array is a step, in the header's
columns; what is missing at its end is null. A line that is an object is anything else:
it has one key that says what. Tensors are indexes into the header's names, which lines
with the key "names" extend; `[0,11]` among indexes means 0 to 11. JSON has no infinity
and no NaN, so they are text.

`statistics_line.py` has the lines of statistics. Reading checks every value and runs
nothing. Imports the standard library only.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from math import isfinite
from typing import Any, TypeAlias

from lossscale.core.validation import format_value
from lossscale.diagnostics.records.steps import (
    CAUSES,
    Nonfinite,
    StepRecord,
)
from lossscale.errors import StateError

FORMAT = "lossscale-run/1"
"""The format that this version writes, and the newest that it reads."""

COLUMNS = (
    "step",
    "time",
    "scale",
    "applied",
    "norm",
    "clip",
    "amax",
    "loss",
    "lr",
    "cause",
    "nonfinite",
    "nearest_finite",
)
"""What the entries of a step are. What most steps do not have comes last."""

MOST_BYTES = 2**26
"""The longest line that is read: the names of a million tensors."""

MOST_TENSORS = 1_000_000

Event: TypeAlias = dict[str, Any]
"""A line that is not a step: an object of one key."""

END = 2**53
"""The first step that is none: JSON numbers are exact up to there."""


def encode(value: Any) -> str:
    """Return a value as one line of strict JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)


def encode_number(value: float | None) -> str:
    """Return a measured number with six digits; infinity and NaN as text."""
    if value is None:
        return "null"
    if isfinite(value):
        return f"{value:.6g}"
    return f'"{value:f}"'


def encode_step(record: StepRecord, positions: Mapping[str, int]) -> str:
    """Return the line of a step, without its end.

    Args:
        record: The step; its tensors must all be in `positions`.
        positions: The index of each name.
    """
    step, seconds, scale, applied, norm, clip, amax, loss, lr, *_ = record
    # 17 digits are exact for every float64, and 65536.0 is written as 65536.
    line = f"[{step},{seconds:.3f},{scale:.17g},{applied:d}"
    try:
        # Most steps: all of it was measured, and is finite.
        if applied and isfinite(norm + clip + amax + loss + lr):  # type: ignore[operator]
            return f"{line},{norm:.6g},{clip:.6g},{amax:.6g},{loss:.6g},{lr:.6g}]"
    except TypeError:
        pass
    measured = map(encode_number, (norm, clip, amax, loss, lr))
    line = f"{line},{','.join(measured)}"
    if applied:
        while line.endswith(",null"):
            line = line[:-5]
        return f"{line}]"
    tensors: dict[str, list[int]] = {}
    for name, cause in record.nonfinite:
        tensors.setdefault(cause, []).append(positions[name])
    ranges = {cause: _as_ranges(sorted(found)) for cause, found in tensors.items()}
    nearest = positions.get(record.nearest_finite or "")
    return f"{line},{encode(record.cause)},{encode(ranges)},{encode(nearest)}]"


def _as_ranges(indexes: list[int]) -> list[int | list[int]]:
    """Return sorted indexes with three or more in a row written as first and last."""
    result: list[int | list[int]] = []
    start = 0
    while start < len(indexes):
        end = start
        while end + 1 < len(indexes) and indexes[end + 1] == indexes[end] + 1:
            end += 1
        if end - start > 1:
            result.append([indexes[start], indexes[end]])
        else:
            result.extend(indexes[start : end + 1])
        start = end + 1
    return result


def decode_step(row: Any, names: Sequence[str]) -> StepRecord | None:
    """Return the step that a parsed line holds; `None` if it does not hold one."""
    if not isinstance(row, list) or len(row) < _STEP_START:
        return None
    step, time, scale, applied, *measured = row
    usable = (
        type(step) is int
        and 0 <= step < END
        and is_number(time)
        and -END < time < END
        and is_number(scale)
        and 0.0 < scale < math.inf
        and applied in (0, 1)
    )
    if not usable:
        return None
    try:
        numbers = [_decode_number(value) for value in measured[:_MEASURED]]
        # Copies of 1.0, True and so on are equal to them, and are not kept.
        start = (step, float(time), float(scale), bool(applied))
    except (TypeError, ValueError, OverflowError):
        return None
    numbers += [None] * (_MEASURED - len(numbers))
    if applied:
        norm, clip, amax, loss, lr = numbers
        return StepRecord(*start, norm, clip, amax, loss, lr)
    return _decode_skipped(start, numbers, measured[_MEASURED:], names)


_STEP_START = 4
_MEASURED = 5


def _decode_skipped(
    start: tuple[int, float, float, bool],
    numbers: list[float | None],
    rest: list[Any],
    names: Sequence[str],
) -> StepRecord | None:
    """Return a skipped step; `None` if what says why is malformed."""
    cause, tensors, nearest = (*rest, None, None, None)[:3]
    cause = "inf" if cause is None else cause
    tensors = {} if tensors is None else tensors
    if cause not in CAUSES or not isinstance(tensors, dict):
        return None
    try:
        nonfinite = _decode_tensors(tensors, names)
        name = None if nearest is None else name_at(nearest, names)
    except (TypeError, ValueError):
        return None
    norm, clip, amax, loss, lr = numbers
    return StepRecord(*start, norm, clip, amax, loss, lr, cause, nonfinite, name)


def _decode_tensors(tensors: dict[str, Any], names: Sequence[str]) -> Nonfinite:
    found: list[tuple[int, str]] = []
    for cause, indexes in tensors.items():
        if cause not in CAUSES or not isinstance(indexes, list):
            raise ValueError
        for index in indexes:
            first, last = index if isinstance(index, list) else (index, index)
            name_at(first, names)
            name_at(last, names)
            if len(found) + last - first > MOST_TENSORS:
                raise ValueError
            found += [(each, cause) for each in range(first, last + 1)]
    return tuple((names[index], cause) for index, cause in sorted(found))


def name_at(index: Any, names: Sequence[str]) -> str:
    """Return the name of a tensor, or raise."""
    if type(index) is not int or not 0 <= index < len(names):
        raise ValueError
    return names[index]


def _decode_number(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) is float or type(value) is int:
        return float(value)
    if value in ("inf", "-inf", "nan"):
        return float(value)
    raise ValueError


def is_number(value: Any) -> bool:
    """Whether a value of a file is a number; booleans are none."""
    return type(value) is float or type(value) is int


def check_header(value: Any, path: str) -> dict[str, Any]:
    """Return a run's header, if it is one that this version reads.

    Raises:
        StateError: If it is not, saying why.
    """
    header = value if isinstance(value, dict) else {}
    written = header.get("format")
    if written != FORMAT:
        name, _, number = str(written).partition("/")
        if name == FORMAT.partition("/")[0] and number.isdecimal():
            message = (
                f"{path} has the format {format_value(written)}, and this version "
                f"reads {FORMAT!r}. Upgrade with: pip install --upgrade lossscale"
            )
        else:
            message = not_a_run(path)
        raise StateError(message)
    columns, names = header.get("columns"), header.get("names")
    usable = (
        isinstance(columns, list)
        and columns[: len(COLUMNS)] == list(COLUMNS)
        and is_name_list(names)
        and isinstance(header.get("run"), str)
        and _is_format(header.get("dtype"))
        and is_number(header.get("started"))
        and -END < header["started"] < END
        and _has_usable_details(header)
    )
    if not usable:
        message = f"{path} has a header that is damaged; it cannot be read."
        raise StateError(message)
    return header


def _has_usable_details(header: dict[str, Any]) -> bool:
    """Whether what a header may leave open is what it seems to be, where it is said."""
    found = {name: header.get(name) for name in (*_MAPPINGS, *_TEXTS, "dtypes")}
    known = {name: value for name, value in found.items() if value is not None}
    try:
        encode(header)  # refuses what is infinite, or too deep
    except (ValueError, RecursionError):
        return False
    return (
        all(isinstance(known.get(name, {}), dict) for name in _MAPPINGS)
        and all(isinstance(known.get(name, ""), str) for name in _TEXTS)
        and is_format_list(known.get("dtypes", []))
    )


_MAPPINGS = ("policy", "config", "versions")
_TEXTS = ("name", "device", "processor")


def is_format_list(value: Any) -> bool:
    """Whether a value is a list of formats."""
    return isinstance(value, list) and all(map(_is_format, value))


def _is_format(value: Any) -> bool:
    return isinstance(value, str) and value in DTYPES


def parse_json(text: bytes) -> Any:
    """Return what a strict JSON text holds: Infinity and NaN are none.

    Raises:
        ValueError: If it is not JSON.
        RecursionError: If it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    message = f"{constant} is no number of JSON."
    raise ValueError(message)


DTYPES = (
    "float16",
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3",
    "float32",
    "float64",
)
"""The formats that a file may name."""


def not_a_run(path: str) -> str:
    """Return what to say of a file that was not written by a `Recorder`."""
    return (
        f"{path} is not a recorded run: its first line is not the header that "
        "lossscale.diagnostics.Recorder writes."
    )


def is_name_list(value: Any) -> bool:
    """Whether a value is a list of names."""
    return (
        isinstance(value, list)
        and len(value) <= MOST_TENSORS
        and all(isinstance(name, str) for name in value)
    )


def describe_policy(policy: Any) -> dict[str, Any] | None:
    """Return the settings of a policy as a header holds them."""
    if policy is None:
        return None
    if isinstance(policy, Mapping):
        return {str(key): _plain(value) for key, value in policy.items()}
    kind = type(policy).__name__.lower()
    settings = asdict(policy) if is_dataclass(policy) else {}  # type: ignore[arg-type]
    return {"kind": kind} | {name: _plain(value) for name, value in settings.items()}


def _plain(value: Any) -> Any:
    """Return a value that strict JSON can hold."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value)


def plain_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping that strict JSON can hold."""
    return {str(key): _plain(value) for key, value in values.items()}


def unique(names: Iterable[str]) -> list[str]:
    """Return names in their order, each once."""
    return list(dict.fromkeys(map(str, names)))
