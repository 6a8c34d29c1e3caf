# SPDX-License-Identifier: Apache-2.0
"""The first line of a run: what it was made with.

Imports the standard library only; the versions of frameworks are those of the modules
that are loaded already.
"""

import platform
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lossscale.core import validation
from lossscale.core.policies import require_policy
from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.records.layout import (
    COLUMNS,
    FORMAT,
    describe_policy,
    plain_mapping,
)
from lossscale.errors import SettingTypeError

_PACKAGES = (
    "lossscale",
    "numpy",
    "torch",
    "triton",
    "jax",
    "flax",
    "optax",
    "tensorflow",
    "keras",
    "accelerate",
    "lightning",
    "transformers",
)


def make_header(
    *,
    name: str | None,
    policy: Any,
    dtype: str,
    names: Iterable[str] | Mapping[str, str],
    device: str | None,
    config: Mapping[str, Any] | None,
    rank: int,
    statistics_every: int,
) -> dict[str, Any]:
    """Return the header of a new run.

    Raises:
        SettingError: If the dtype is unknown.
        SettingTypeError: If something is of the wrong type, such as the policy.
    """
    return {
        "format": FORMAT,
        "run": secrets.token_hex(8),
        "name": to_text(name),
        "started": round(time.time(), 3),
        "columns": list(COLUMNS),
        "dtype": validation.check_choice("dtype", dtype, FORMATS),
        "policy": describe_policy(check_policy(policy)),
        "device": to_text(device),
        "processor": platform.processor() or platform.machine(),
        "versions": find_versions(),
        "rank": rank,
        "statistics_every": statistics_every,
        "config": plain_mapping(check_config(config)),
        "dtypes": check_dtypes(names),
        "names": check_names(names),
    }


def check_policy(policy: Any) -> Any:
    """Return what describes a policy: itself, a mapping of its settings, or `None`."""
    if policy is not None and not isinstance(policy, Mapping):
        require_policy(policy)
    return policy


def to_text(value: Any) -> str | None:
    """Return a text, or `None`; a header with anything else could not be read."""
    return None if value is None else str(value)


def check_config(config: Any) -> Mapping[str, Any]:
    """Return what is to be kept with a run."""
    if config is not None and not isinstance(config, Mapping):
        message = (
            'config must be a mapping, such as {"batch": 32}, got '
            f"{validation.format_value(config)}. For the settings of argparse or a "
            "dataclass pass vars(...)."
        )
        raise SettingTypeError(message)
    return config or {}


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are loaded."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        if package in sys.modules:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                found[package] = _find_version_in_code(package)
    return found


def _find_version_in_code(package: str) -> str:
    """Return what a loaded module says, such as one that tensorflow-cpu installed."""
    # Not by getattr, which a module may answer by asking for its installed version.
    found = vars(sys.modules[package]).get("__version__")
    return found if isinstance(found, str) else "from source"


def check_names(names: Iterable[str]) -> list[str]:
    """Return the names of tensors, each once."""
    listed = [] if isinstance(names, str) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in listed):
        message = (
            "names must be names of tensors in the model's order, such as "
            "[name for name, _ in model.named_parameters()], or a mapping from them to "
            f"dtypes; got {validation.format_value(names)}."
        )
        raise SettingTypeError(message)
    return list(dict.fromkeys(listed))


def check_dtypes(names: Iterable[str] | Mapping[str, str]) -> list[str] | None:
    """Return the dtypes of tensors, in the order of their names, if they are given."""
    if not isinstance(names, Mapping):
        return None
    return [
        validation.check_choice(f"The dtype of {n!r}", d, FORMATS)
        for n, d in names.items()
    ]
