# SPDX-License-Identifier: Apache-2.0
"""What a framework says of a run after its header was written.

    {"described":{"policy":{"kind":"dynamic",...},"device":"cpu","ordered":2,
     "dtypes":["float16","float32"]}}

A scaler knows its policy, device and tensors when it takes its first step, and the
header is the first line of the file. What the header leaves open is therefore a line of
its own, which readers merge into the header. What the header says, it keeps. Imports
the standard library only.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.records.layout import is_format_list, plain_mapping


def describe_formats(
    dtypes: Mapping[str, str], names: Sequence[str], default: str
) -> list[str]:
    """Return the format of each tensor, in the order of the run's names.

    Args:
        dtypes: The formats by name; one that has no name here counts as the default.
        names: The run's names.
        default: The format of the run.
    """
    found = (dtypes.get(name, default) for name in names)
    return [dtype if dtype in FORMATS else default for dtype in found]


def merge_description(
    header: MutableMapping[str, Any], value: Any, names: Sequence[str]
) -> None:
    """Fill in what a header leaves open; what is malformed is left out.

    Args:
        header: The header, which is changed.
        value: What a line with the key "described" holds.
        names: The names of the run.
    """
    given = value if isinstance(value, dict) else {}
    policy, device = given.get("policy"), given.get("device")
    dtypes, ordered = given.get("dtypes"), given.get("ordered")
    if header.get("policy") is None and isinstance(policy, dict):
        header["policy"] = plain_mapping(policy)
    if header.get("device") is None and isinstance(device, str):
        header["device"] = device
    if header.get("dtypes") is None and is_format_list(dtypes):
        header["dtypes"] = dtypes
    if not header.get("names") and type(ordered) is int:
        header["names"] = list(names[: max(0, ordered)])
