# SPDX-License-Identifier: Apache-2.0
"""Describe a run to a callback that asks for it, as a `Recorder` does.

A callback asks by having a method `describe`. It is called once: at the first step,
when the device and the parameters are known.
"""

import platform
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from lossscale.core.policies import Policy
from lossscale.torch.parameters import params_of
from lossscale.torch.scaler.param_names import ParamNames
from lossscale.torch.scaler.report import OptimizerOutcome

Describe: TypeAlias = Callable[..., object]
"""Takes the keywords `policy`, `device`, `names` and `dtypes`."""


def find_describe(on_step: object) -> Describe | None:
    """Return the method of a callback that is to be called, if it has one."""
    describe: Any = getattr(on_step, "describe", None)
    return describe if callable(describe) else None


def describe_run(
    describe: Describe,
    policy: Policy,
    device: torch.device,
    names: ParamNames,
    outcomes: list[OptimizerOutcome],
) -> None:
    """Tell a callback what a run is made of.

    Args:
        describe: Its method.
        policy: The policy of the scale.
        device: Where the scale is.
        names: The names of the parameters, as far as they were given.
        outcomes: The optimizers of the first step.
    """
    dtypes: dict[str, str] = {}
    for outcome in outcomes:
        optimizer = outcome.optimizer()
        if optimizer is None:
            continue
        for index, param in enumerate(params_of(optimizer)):
            dtypes[names.name_of(optimizer, index)] = _name_format(param.dtype)
    # An optimizer's own order need not be the model's: groups are made by weight decay.
    ordered = [name for name in names.list_trained() if name in dtypes]
    describe(policy=policy, device=_name_device(device), names=ordered, dtypes=dtypes)


def _name_format(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "float8_e4m3" if name == "float8_e4m3fn" else name


def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"cpu ({platform.machine()})"
    return device.type
