# SPDX-License-Identifier: Apache-2.0
"""The optimizers' formulas: what a step adds to one weight, before it is rounded.

They read the state as it is before the step, change nothing, and compute in the dtype
of the tensors. Settings that are tensors are read, which waits for their device.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

Kept = Mapping[str, torch.Tensor]
"""What the optimizer keeps for the weight, by name, in the dtype of the weight."""


def add_by_adam(
    weight: torch.Tensor,
    grad: torch.Tensor,
    kept: Kept,
    count: float,
    group: Mapping[str, Any],
) -> torch.Tensor:
    """Return what a step of Adam or AdamW adds to a weight.

    Args:
        weight: The weight.
        grad: Its unscaled gradient.
        kept: The moments; those that are missing are zero.
        count: How many steps came before.
        group: The settings.
    """
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = map(float, group["betas"])
    grad = -grad if group["maximize"] else grad
    if not group["decoupled_weight_decay"]:
        grad = grad + decay * weight
    zeros = torch.zeros_like(weight)
    mean = beta1 * kept.get("exp_avg", zeros) + (1 - beta1) * grad
    square = beta2 * kept.get("exp_avg_sq", zeros) + (1 - beta2) * grad.square()
    if group["amsgrad"]:
        square = torch.maximum(square, kept.get("max_exp_avg_sq", zeros))
    correction1 = 1 - math.pow(beta1, count + 1)
    correction2 = 1 - math.pow(beta2, count + 1)
    root = square.sqrt() / math.sqrt(correction2)
    update = mean / (root + float(group["eps"])) * (-rate / correction1)
    if group["decoupled_weight_decay"]:
        update -= rate * decay * weight
    return update


def add_by_sgd(
    weight: torch.Tensor, grad: torch.Tensor, kept: Kept, group: Mapping[str, Any]
) -> torch.Tensor:
    """Return what a step of SGD adds to a weight.

    Args:
        weight: The weight.
        grad: Its unscaled gradient.
        kept: The momentum; without it, this is its first step.
        group: The settings.
    """
    momentum = float(group["momentum"])
    grad = -grad if group["maximize"] else grad
    grad = grad + float(group["weight_decay"]) * weight
    if momentum:
        buffer = kept.get("momentum_buffer")
        if buffer is None:
            buffer = grad  # torch dampens no first step
        else:
            buffer = momentum * buffer + (1 - float(group["dampening"])) * grad
        grad = grad + momentum * buffer if group["nesterov"] else buffer
    return grad * -float(group["lr"])
