# SPDX-License-Identifier: Apache-2.0
"""The NumPy adapter: the reference, and the one to copy for another framework.

functional.py  init, scale, unscale, update, select
classic.py     TensorFlow's seven classic classes on NumPy arrays

It imports the core and NumPy, and no other adapter.
"""

from lossscale.core.optional import explain_missing

try:
    import numpy  # noqa: F401, ICN001
except ModuleNotFoundError as error:
    raise explain_missing(error, "numpy", "NumPy") from None

from lossscale.core.classic import LossScale, LossScaleManager
from lossscale.numpy.classic import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScale,
    FixedLossScaleManager,
    LossScaleOptimizer,
    get,
)
from lossscale.numpy.functional import init, scale, select, unscale, update

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScale",
    "LossScaleManager",
    "LossScaleOptimizer",
    "get",
    "init",
    "scale",
    "select",
    "unscale",
    "update",
]
