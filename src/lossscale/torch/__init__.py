# SPDX-License-Identifier: Apache-2.0
"""The torch adapter: the five verbs and the seven classic classes."""

from lossscale.core.classic import LossScale, LossScaleManager
from lossscale.torch.classic import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScale,
    FixedLossScaleManager,
    get,
)
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.optimizer import LossScaleOptimizer
from lossscale.torch.steps import StepReport
from lossscale.torch.verbs import init, scale, select, unscale, update

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "GradScaler",
    "LossScale",
    "LossScaleManager",
    "LossScaleOptimizer",
    "StepReport",
    "get",
    "init",
    "scale",
    "select",
    "unscale",
    "update",
]
