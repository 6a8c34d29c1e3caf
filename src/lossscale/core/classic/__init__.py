# SPDX-License-Identifier: Apache-2.0
"""Bodies of TensorFlow's seven classic loss-scaling classes, without a framework.

Each class reads its state, takes one step of a policy and assigns the result; what
that means in a framework is a `Binding`. A framework's module subclasses the bodies
with its binding and adds nothing else. Behaviour follows the reference pages of the
originals first and the recorded originals where the pages are silent; every
difference is a row of the compatibility page.
"""

from lossscale.core.classic.binding import (
    Binding,
    EagerBinding,
    StateVariables,
    Variable,
)
from lossscale.core.classic.loss_scales import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    get,
)
from lossscale.core.classic.managers import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from lossscale.core.classic.optimizer import LossScaleOptimizer

__all__ = [
    "Binding",
    "DynamicLossScale",
    "EagerBinding",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScale",
    "LossScaleManager",
    "LossScaleOptimizer",
    "StateVariables",
    "Variable",
    "get",
]
