# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for mixed-precision training, once, for every framework.

This module holds the names that need no framework and loads nothing but the standard
library. The frameworks' modules (`lossscale.numpy`, ...) are imported by name.
"""

from lossscale.core import errors, presets
from lossscale.core.policies import Dynamic, Fixed, Policy
from lossscale.core.portable import from_portable, to_portable
from lossscale.core.state import ScaleState, Signal

__all__ = [
    "Dynamic",
    "Fixed",
    "Policy",
    "ScaleState",
    "Signal",
    "errors",
    "from_portable",
    "presets",
    "to_portable",
]


def __getattr__(name: str) -> str:
    """Return `__version__` when asked: reading it costs an import most do not need."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("lossscale")
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
