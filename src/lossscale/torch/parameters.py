# SPDX-License-Identifier: Apache-2.0
"""The parameters of an optimizer."""

import torch


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order of its groups.

    Not to be changed: it may be the list of the only group.
    """
    groups = optimizer.param_groups
    if len(groups) == 1 and type(groups[0]["params"]) is list:
        params: list[torch.Tensor] = groups[0]["params"]
        return params
    return [param for group in optimizer.param_groups for param in group["params"]]


def has_grads(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any parameter of an optimizer has a gradient."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return True
    return False
