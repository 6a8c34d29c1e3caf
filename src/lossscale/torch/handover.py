# SPDX-License-Identifier: Apache-2.0
"""Optimizers that divide the gradients and skip the step by themselves.

Such an optimizer says `_step_supports_amp_scaling`. It is called on every step with two
tensors, `grad_scale` (what divides the gradients) and `found_inf` (exactly 0 or 1), or,
in an older form of the agreement, with the scaler itself.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from lossscale.errors import ContextError
from lossscale.torch.calls import warn_caller


def takes_scale(optimizer: Any) -> bool:
    """Whether an optimizer unscales and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: Any) -> bool:
    """Whether it does so in the older form, which asks for the scaler."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        return bool(_asks[step])
    except (KeyError, TypeError):
        asks = "grad_scaler" in inspect.signature(optimizer.step).parameters
        with suppress(TypeError):  # no function: nothing to remember it by
            _asks[step] = asks
        return asks


_asks: Any = WeakKeyDictionary()
"""What is known of the signatures of steps; to look at one takes longer than a step."""


def refuse_scaler_takers(optimizers: Iterable[Any]) -> None:
    """Raise if an optimizer cannot be held back together with others."""
    for optimizer in optimizers:
        if takes_scale(optimizer) and takes_scaler(optimizer):
            message = (
                f"step_all() cannot hold {type(optimizer).__name__} back: it asks for "
                "the scaler and decides by itself. Step it with step()."
            )
            raise ContextError(message)


def step_with_scaler(
    optimizer: Any, scaler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Step an optimizer that asks for the scaler."""
    warn_caller(
        "GradScaler is going to stop passing itself as a keyword argument to "
        "the passed optimizer. In the near future GradScaler registers "
        "`grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer "
        "and let the optimizer use them directly.",
        FutureWarning,
    )
    return optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})


def is_watched(optimizer: Any) -> bool:
    """Whether somebody takes a call of the optimizer's step for a step taken.

    Accelerate replaces the method for the time of the step and asks afterwards whether
    it was called. A fused optimizer is always called, so its skipped steps count as
    taken, and the schedule goes on (Accelerate issue 4242). Such a step is held back on
    the host instead. That waits for the flag, once a step: Accelerate wants to know
    before the next one.
    """
    step = vars(optimizer).get("step") if hasattr(optimizer, "__dict__") else None
    return getattr(step, "__module__", None) == "accelerate.optimizer"


def inner(optimizer: Any) -> Any:
    """Return the optimizer that is stepped in the end.

    The wrappers of some packages give the scaler the one inside. Gradients that were
    unscaled or clipped under the wrapper's name would be unscaled again.
    """
    while type(optimizer).__module__.partition(".")[0] in _WRAPPING:
        if not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    return optimizer


_WRAPPING = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""The packages whose optimizers have a torch optimizer in them, as `optimizer`."""


def stepped_by(optimizer: Any, wrapper: Any) -> Any:
    """Return what to call `step` of: the wrapper, unless it calls a scaler in turn."""
    holders = [
        wrapper,
        getattr(getattr(wrapper, "_strategy", None), "precision", None),
        getattr(getattr(wrapper, "_strategy", None), "precision_plugin", None),
    ]
    scales = any(getattr(holder, "scaler", None) is not None for holder in holders)
    return optimizer if scales else wrapper


@contextmanager
def handed_over(optimizer: Any, divisor: Any, found: Any) -> Iterator[None]:
    """Lend an optimizer the two tensors for one step.

    A `grad_scale` that the caller has set beforehand divides as well. torch leaves its
    own behind when the step raises, and it multiplies into the next one; here the
    caller's stands again after an error, and both are gone after a step, as in torch.

    Args:
        optimizer: It takes `grad_scale` and `found_inf`.
        divisor: What divides the gradients; `None` if they are unscaled already.
        found: 1.0 to skip, else 0.0.
    """
    preset = getattr(optimizer, "grad_scale", None)
    left = _left.get(id(optimizer))
    if left is not None and left.ours is preset:
        preset = left.preset  # an interrupt came before the lines at the end of this
    ours = preset if divisor is None else divisor
    if divisor is not None and preset is not None:
        ours = divisor * preset
    _left[id(optimizer)] = _Left(ours, preset)
    optimizer.grad_scale = ours
    optimizer.found_inf = found
    done = False
    try:
        yield
        done = True
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf
        if preset is not None and not done:
            optimizer.grad_scale = preset
        del _left[id(optimizer)]


class _Left(NamedTuple):
    """What an optimizer has as `grad_scale` while it is stepped, and had before."""

    ours: Any
    preset: Any


_left: dict[int, _Left] = {}
"""By the id of the optimizer, while it is stepped. What stays here after an interrupt
is told from a `grad_scale` of the caller's by its tensor."""


def prepare_momentum(optimizer: Any, found: Any) -> bool:
    """Give a fused SGD its momentum buffers; return whether its step may be called.

    torch allocates them without a value on the first step, and when that step is
    skipped the next one takes what was in the memory for momentum. Zeros are what a
    first step starts from, unless it is dampened: torch does not dampen the first one.
    Then the flag is read, once, and a skipped first step is not called at all.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    dampened = False
    for group in optimizer.param_groups:
        if not group.get("fused") or not group.get("momentum"):
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter] if parameter.grad is not None else None
            if state is None or state.get("momentum_buffer") is not None:
                continue
            if group["dampening"]:
                dampened = True
            else:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
    return not dampened or not bool(found)
