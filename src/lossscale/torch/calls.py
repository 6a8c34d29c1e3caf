# SPDX-License-Identifier: Apache-2.0
"""Warnings that point at the caller's line, however deep in lossscale they arise."""

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent.parent)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn about the first line outside of lossscale and of torch's own scaler."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE) or file.endswith("torch/amp/grad_scaler.py")
