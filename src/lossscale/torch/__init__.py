# SPDX-License-Identifier: Apache-2.0
"""The PyTorch adapter: `GradScaler`, the five verbs and the seven classic classes.

The scaler:
    grad_scaler    `GradScaler`: what is new in it
    arguments      the same: what it is given
    drop_in        the same: torch's unscale_, step and update
    looking        the same: how it looks at gradients
    agreeing       the same: how it decides together with other ranks
    keeping        the same: its settings, its state, the book of an iteration
    sharded        `ShardedGradScaler`, for FSDP1
    ranks          which ranks decide together: process groups and meshes
    agreement      what they send each other
    sharding       DTensors: the part that is on this rank
    gradients      an optimizer's gradients, sorted by what can read them
    layouts        whether they are laid out as a step ago
    eager          looks at them with torch's operations
    fast           whether the kernels can be used
    kernels        looks at them with Triton, imported by the first step that needs it
    verdict        what they were, in one small buffer on their device
    rules          a policy at work on the scaler's tensors
    handover       optimizers that divide and skip by themselves
    clipping       clipping by the norm, in the same read as the check
    closures       optimizers that ask for the loss themselves
    accumulation   micro-batches, the bad ones left out
    steps          `StepReport`; observers, schedulers and the alarm
    operators      looks at gradients as torch operators, for what is compiled
    compiling      what is not compiled
    devices        what is asked of any device

The verbs:
    verbs          init, scale, unscale, update, select
    leaves         one gradient: dense or sparse, real or complex
    measurements   what `unscale` measures when it is asked to

The classic classes:
    classic        managers and loss scales
    optimizer      the optimizer wrapper
    inner          the optimizers that it wraps
    binding        what torch lends to all of them
"""

from lossscale.core.optional import explain_missing

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise explain_missing(error, "torch", "PyTorch") from None

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
from lossscale.torch.sharded import ShardedGradScaler
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
    "ShardedGradScaler",
    "StepReport",
    "get",
    "init",
    "scale",
    "select",
    "unscale",
    "update",
]
