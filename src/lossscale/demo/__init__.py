# SPDX-License-Identifier: Apache-2.0
"""Show why float16 training needs loss scaling, on real digits, with NumPy alone.

Four runs of one network on the same batches from the same start: float32, float16
without a scale, float16 with a fixed scale, float16 with a dynamic scale. Needs NumPy;
`picture` also needs matplotlib, and imports it only when called.
"""

import lossscale.numpy  # noqa: F401  # without NumPy, it says what to install
from lossscale.demo.data import Digits, load_digits
from lossscale.demo.picture import check_matplotlib, draw
from lossscale.demo.training import Run, Step, compare, train

__all__ = [
    "Digits",
    "Run",
    "Step",
    "check_matplotlib",
    "compare",
    "draw",
    "load_digits",
    "train",
]
