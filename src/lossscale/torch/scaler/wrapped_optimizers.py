# SPDX-License-Identifier: Apache-2.0
"""The optimizers of packages that wrap torch's: Accelerate, Lightning and Fabric."""

from typing import Any

import torch

_PACKAGES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""The packages whose optimizers have a torch optimizer in them, as `optimizer`."""


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that is stepped in the end.

    Some packages give the scaler the wrapped optimizer themselves. Gradients that were
    unscaled or clipped under the wrapper's id would be unscaled again.
    """
    while type(optimizer).__module__.partition(".")[0] in _PACKAGES:
        if not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    innermost: torch.optim.Optimizer = optimizer
    return innermost


def choose_stepped(
    optimizer: torch.optim.Optimizer, wrapper: Any
) -> torch.optim.Optimizer:
    """Return whose `step` to call: the wrapper's, unless it calls a scaler in turn."""
    strategy = getattr(wrapper, "_strategy", None)
    holders = (
        wrapper,
        getattr(strategy, "precision", None),
        getattr(strategy, "precision_plugin", None),
    )
    scales = any(getattr(holder, "scaler", None) is not None for holder in holders)
    return optimizer if scales else wrapper


def treats_call_as_applied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Accelerate treats the call of `step` itself as proof that it was applied.

    Accelerate replaces the method during the step and asks afterwards whether it was
    called. A fused optimizer is always called, so its skipped steps would count as
    applied, and the schedule would go on (Accelerate issue 4242). Such a step is held
    back on the host instead. That waits for the flag, once a step: Accelerate wants to
    know before the next one.
    """
    step = vars(optimizer).get("step") if hasattr(optimizer, "__dict__") else None
    return getattr(step, "__module__", None) == "accelerate.optimizer"
