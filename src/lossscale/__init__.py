# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for mixed-precision training, once, for every framework.

These names need no framework: importing `lossscale` loads the standard library alone.
Import a framework's module (`lossscale.torch`, `lossscale.jax`, ...) by its name.
"""

from lossscale import convert, errors, presets
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
from lossscale.core.explanation import Explanation, Finding
from lossscale.core.measurements import AboveEdge
from lossscale.core.policies import Dynamic, Fixed, Policy
from lossscale.core.portable import from_portable, load, save, to_portable
from lossscale.core.state import ScaleState, Signal

__all__ = [
    "AboveEdge",
    "AutoStart",
    "Dynamic",
    "Explanation",
    "Finding",
    "Fixed",
    "Headroom",
    "Histogram",
    "LogMax",
    "OverflowRate",
    "Policy",
    "RisingFloor",
    "Saturation",
    "ScaleState",
    "Signal",
    "WindowFollowsScale",
    "convert",
    "errors",
    "from_portable",
    "load",
    "presets",
    "save",
    "to_portable",
]


def __getattr__(name: str) -> str:
    """Return `__version__` when asked: reading it costs an import most do not need."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("lossscale")
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
