# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's classic loss-scale classes on torch tensors, for code that is ported.

    loss_scales.py        managers and loss scales
    optimizer.py          LossScaleOptimizer, around an optimizer of torch
    wrapped_optimizer.py  the optimizers that it wraps
    binding.py            tensors, for the framework-free bodies in
    `lossscale.core.classic`

New code uses `lossscale.torch.GradScaler`.
"""

from lossscale.core.classic import LossScale, LossScaleManager
from lossscale.torch.classic.loss_scales import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScale,
    FixedLossScaleManager,
    get,
)
from lossscale.torch.classic.optimizer import LossScaleOptimizer

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScale",
    "LossScaleManager",
    "LossScaleOptimizer",
    "get",
]
