# SPDX-License-Identifier: Apache-2.0
"""Optimizers that divide the gradients and skip the step by themselves.

Such an optimizer has `_step_supports_amp_scaling`. It is called at every step with two
tensors, `grad_scale` (what divides the gradients) and `found_inf` (exactly 0 or 1), or,
in an older form of the protocol, with the scaler itself.
"""

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import OptState

from lossscale.errors import ContextError
from lossscale.torch.calls import warn_caller
from lossscale.torch.inspection.groups import any_flag
from lossscale.torch.optim.optimizer import ScaledOptimizer
from lossscale.torch.scaler.wrapped_optimizers import treats_call_as_applied

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from lossscale.torch.scaler.iteration import OptimizerStep

StepArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""What the caller passes to `optimizer.step`, by position and by name."""


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer unscales and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the `step` of a fused optimizer asks for the scaler: the older form."""
    step: Callable[..., Any] = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        return _takes_scaler[step]
    except (KeyError, TypeError):
        takes = "grad_scaler" in inspect.signature(optimizer.step).parameters
        with suppress(TypeError):  # no weak references
            _takes_scaler[step] = takes
        return takes


_takes_scaler: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()
"""Reading a signature takes longer than a step."""


def refuse_scaler_takers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer cannot be held back together with others."""
    for optimizer in optimizers:
        if is_fused(optimizer) and takes_scaler(optimizer):
            message = (
                f"step_all() cannot hold {type(optimizer).__name__} back: it asks for "
                "the scaler and decides by itself. Step it with step()."
            )
            raise ContextError(message)


def step_with_scaler(
    optimizer: torch.optim.Optimizer, scaler: "GradScaler", arguments: StepArguments
) -> Any:
    """Step an optimizer that asks for the scaler."""
    warn_caller(
        "GradScaler is going to stop passing itself as a keyword argument to "
        "the passed optimizer. In the near future GradScaler registers "
        "`grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer "
        "and let the optimizer use them directly.",
        FutureWarning,
    )
    args, kwargs = arguments
    return optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})


def step_fused(
    step: "OptimizerStep",
    stepped: torch.optim.Optimizer,
    arguments: StepArguments,
    scale: torch.Tensor,
    *,
    is_exact: bool,
) -> Any:
    """Step a fused optimizer; nothing waits.

    Args:
        step: Its step; the gradients are checked.
        stepped: The optimizer, or a wrapper of a package around it.
        arguments: What its `step` takes.
        scale: The scale of the loss.
        is_exact: Whether the flags that were recorded are exactly 0 or 1.
    """
    optimizer = step.optimizer
    flags = list(step.found_inf.values())
    if is_exact and len(flags) == 1 and flags[0].device == scale.device:
        found_inf = flags[0]
    else:
        found_inf = any_flag(flags, scale.device)
    grad_scale = step.grad_scale
    if grad_scale is None and step.stage is OptState.READY:
        grad_scale = scale
    if not prepare_momentum(optimizer, found_inf):
        return None
    if treats_call_as_applied(optimizer) and bool(found_inf):
        return None
    return step_with_grad_scale(optimizer, stepped, arguments, grad_scale, found_inf)


def step_with_grad_scale(
    optimizer: Any,
    stepped: torch.optim.Optimizer,
    arguments: StepArguments,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
) -> Any:
    """Step an optimizer that has `grad_scale` and `found_inf` meanwhile.

    A `grad_scale` that the caller has set before divides as well. torch leaves its own
    behind when the step raises, and it multiplies into the next one; here the caller's
    is restored after an error, and both are gone after a step, as in torch.

    Args:
        optimizer: It takes `grad_scale` and `found_inf`.
        stepped: The same, or a wrapper of a package around it.
        arguments: What its `step` takes.
        grad_scale: What divides the gradients; `None` if they are unscaled already.
        found_inf: 1.0 to skip, else 0.0.
    """
    preset = getattr(optimizer, "grad_scale", None)
    interrupted = _left_behind.get(id(optimizer))
    if interrupted is not None and interrupted.active is preset:
        preset = interrupted.preset  # an interrupt came before the end of this function
    active = preset if grad_scale is None else grad_scale
    if grad_scale is not None and preset is not None:
        active = grad_scale * preset
    _left_behind[id(optimizer)] = _Active(active, preset)
    optimizer.grad_scale = active
    optimizer.found_inf = found_inf
    completed = False
    args, kwargs = arguments
    try:
        result = stepped.step(*args, **kwargs)
        completed = True
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf
        if preset is not None and not completed:
            optimizer.grad_scale = preset
        del _left_behind[id(optimizer)]
    return result


class _Active(NamedTuple):
    """The `grad_scale` of an optimizer while it is stepped, and before."""

    active: torch.Tensor | None
    preset: torch.Tensor | None


_left_behind: dict[int, _Active] = {}
"""By the id of the optimizer, while it is stepped. The tensor of an entry that stays
after an interrupt differs from a `grad_scale` of the caller's."""


def prepare_momentum(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> bool:
    """Make the momentum buffers of a fused SGD; return whether its step may be called.

    torch allocates them without a value in the first step, and if that step is skipped
    the next one reads what was in the memory. Zeros are what a first step starts from,
    unless it is dampened: torch does not dampen the first one. Then the flag is read,
    once, and a skipped first step is not called at all. Our own SGD does so by itself.
    """
    is_torchs = isinstance(optimizer, torch.optim.SGD)
    if not is_torchs or isinstance(optimizer, ScaledOptimizer):
        return True
    is_dampened = False
    for group in optimizer.param_groups:
        if not group.get("fused") or not group.get("momentum"):
            continue
        for param in group["params"]:
            state = optimizer.state[param] if param.grad is not None else None
            if state is None or state.get("momentum_buffer") is not None:
                continue
            if group["dampening"]:
                is_dampened = True
            else:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
    return not is_dampened or not bool(found_inf)
