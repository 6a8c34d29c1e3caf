# SPDX-License-Identifier: Apache-2.0
"""What `GradScaler` is given: checked when it is made, not at step 40,000."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lossscale.core import validation
from lossscale.core.policies import Policy
from lossscale.errors import SettingError, SettingTypeError
from lossscale.torch.steps import Names

_TORCHS_NUMBERS = (2.0**16, 2.0, 0.5, 2000)


def check_optimizer(method: str, optimizer: Any) -> Any:
    """Return what was given if it is an optimizer, or raise."""
    if hasattr(optimizer, "param_groups"):
        return optimizer
    argument = "optimizer, 1.0" if method == "clip_grad_norm_" else "optimizer"
    message = (
        f"{method}() takes the optimizer, got {validation.format_value(optimizer)} "
        f"({type(optimizer).__name__}). Write scaler.{method}({argument})."
    )
    raise SettingTypeError(message)


def check_policy(policy: Any, numbers: tuple[Any, ...]) -> None:
    """Raise unless a policy is one, and comes alone."""
    if not isinstance(policy, Policy):
        message = (
            f"policy must have init() and step(), got {validation.format_value(policy)}. Write "
            "Dynamic(...), Fixed(...) or presets.get(...)."
        )
        raise SettingError(message)
    if numbers != _TORCHS_NUMBERS:
        message = (
            "policy= was given together with init_scale, growth_factor, backoff_factor "
            "or growth_interval; put these numbers into the policy, such as "
            "policy=Dynamic(init_scale=1024.0)."
        )
        raise SettingError(message)


def named(
    names: Iterable[tuple[str, Any]] | Mapping[str, Any] | None,
    module: torch.nn.Module | None,
) -> Names | None:
    """Return the names that were given, one way or the other."""
    if names is not None and module is not None:
        message = "names= and module= were both given; one of them is enough."
        raise SettingError(message)
    if module is not None:
        if not isinstance(module, torch.nn.Module):
            message = f"module must be a torch.nn.Module, got {validation.format_value(module)}."
            raise SettingTypeError(message)
        return Names(module.named_parameters())
    if isinstance(names, Mapping):
        return Names(names.items())
    return None if names is None else Names(names)
