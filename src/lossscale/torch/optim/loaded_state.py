# SPDX-License-Identifier: Apache-2.0
"""A state dict that is loaded: masters and moments keep the optimizer's dtypes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lossscale.errors import StateError
from lossscale.torch.optim.masters import MASTER

if TYPE_CHECKING:
    from lossscale.torch.optim.optimizer import ScaledOptimizer


def keep_dtypes(
    optimizer: "ScaledOptimizer", state: dict[str, Any], loaded: Mapping[str, Any]
) -> None:
    """Replace what torch has cast to the dtype of a parameter.

    Args:
        optimizer: The optimizer that loads.
        state: The new state, after torch's casts.
        loaded: The state dict that it was made from.
    """
    saved = (key for group in loaded["param_groups"] for key in group["params"])
    params = (param for group in state["param_groups"] for param in group["params"])
    for key, param in zip(saved, params, strict=True):
        kept = state["state"].get(param)
        for name, value in loaded["state"].get(key, {}).items():
            if name == "step" or name not in optimizer.kept_names:
                continue  # what a subclass keeps may have any shape
            if not isinstance(value, torch.Tensor):
                continue
            if value.shape != param.shape:
                message = (
                    f"{name} has the shape {tuple(value.shape)}, and its parameter "
                    f"{tuple(param.shape)}. Load the state of the same model."
                )
                raise StateError(message)
            if name == MASTER and not optimizer.has_master(param):
                del kept[name]
            else:
                kept[name] = _as_kept(optimizer, param, name, value)


def _as_kept(
    optimizer: "ScaledOptimizer", param: torch.Tensor, name: str, value: torch.Tensor
) -> torch.Tensor:
    """Return a loaded tensor as it is kept: a copy, laid out as the parameter."""
    dtype = torch.float32 if name == MASTER else optimizer.state_dtype(param)
    if not value.is_floating_point():
        dtype = value.dtype
    return torch.empty_like(param, dtype=dtype).copy_(value)
