# SPDX-License-Identifier: Apache-2.0
"""Warnings that point at the caller's line, however deep in lossscale they arise."""

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent.parent)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn about the first line outside of lossscale and of torch's own scaler."""
    warnings.warn(message, category, stacklevel=stack_level_of_caller())


def stack_level_of_caller() -> int:
    """Return the `stacklevel` of the first frame outside of lossscale."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _is_inside(file: str) -> bool:
    return file.startswith(_PACKAGE) or file.endswith("torch/amp/grad_scaler.py")
