# SPDX-License-Identifier: Apache-2.0
"""Masters: float32 weights of half-precision parameters, for and from modules."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from lossscale.errors import StateError
from lossscale.torch.optim.eager import write_weight

HALF = (torch.float16, torch.bfloat16)
"""The dtypes of parameters that can have a master."""

MASTER = "master_param"
"""The key of a master in the state of its parameter; the name that others use too."""


def export_weights(
    module: torch.nn.Module, masters: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    """Return the state dict of a module in float32, with the masters' numbers.

    Args:
        module: The module.
        masters: The masters, by the id of their parameter.
    """
    exported = module.state_dict(keep_vars=True)
    for name, value in exported.items():
        if isinstance(value, torch.Tensor):
            weight = masters.get(id(value), value).detach()
            dtype = torch.float32 if weight.dtype in HALF else weight.dtype
            exported[name] = weight.to(dtype, copy=True)
    return exported


def load_weights(
    module: torch.nn.Module,
    state_dict: Mapping[str, torch.Tensor],
    with_master: Collection[int],
    master_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Load float32 weights into a module and, unrounded, into the masters.

    Args:
        module: The module.
        state_dict: A state dict of it in float32, with its names.
        with_master: The ids of the parameters that have masters.
        master_of: Returns the master of one of them.

    Raises:
        StateError: If such a parameter is missing from the state dict; nothing is
            changed.
    """
    params = {
        name: param for name, param in module.named_parameters() if param.dtype in HALF
    }
    missing = sorted(
        name
        for name, param in params.items()
        if id(param) in with_master and name not in state_dict
    )
    if missing:
        message = (
            f"The state dict has no weights for {missing[0]}. It must have the "
            "module's own names, also where a hook of the module renames them: "
            "the masters are loaded by name."
        )
        raise StateError(message)
    module.load_state_dict(state_dict)
    saturated = []
    for name, param in params.items():
        if name not in state_dict:
            continue
        weight = state_dict[name]
        if id(param) in with_master:
            weight = master_of(param).copy_(weight)
        weight = weight.to(param.device)
        if bool((param.isinf() & weight.isfinite()).any()):
            write_weight(param, weight)
            saturated.append(name)
    if saturated:
        message = (
            f"Weights beyond the range of their dtype were loaded as its largest "
            f"number: {', '.join(saturated)}. Masters have the float32 numbers."
        )
        warnings.warn(message, stacklevel=4)
