# SPDX-License-Identifier: Apache-2.0
"""Optimizers that ask for the loss themselves: LBFGS, SAM and their kind.

The closure scales its loss, runs `backward` and returns the loss. After each call the
gradients are unscaled and checked. A gradient that is not finite ends the optimizer's
step where it is: by then it may have moved the weights, so they and the optimizer's
state are put back. So they are if anything is raised in between.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from lossscale.errors import ContextError
from lossscale.torch.gradients import parameters


class _NotFiniteError(Exception):
    """Ends an optimizer's step from within its closure."""


def take_closure(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any] | None, tuple[Any, ...], dict[str, Any]]:
    """Return the closure among the arguments of a step, and the other arguments.

    A function is one if it is given by that name, or first to an optimizer whose first
    parameter has that name. Any other function is an argument like others.
    """
    closure = kwargs.get("closure")
    if closure is not None:
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return closure, args, rest
    if args and callable(args[0]) and _first_parameter(optimizer) == "closure":
        return args[0], args[1:], kwargs
    return None, args, kwargs


def _first_parameter(optimizer: Any) -> str | None:
    """Return the name of the first argument that an optimizer's step takes.

    Accelerate puts a function of any arguments in its place; then that of the class.
    """
    names = list(inspect.signature(optimizer.step).parameters)
    if names[:1] == ["args"]:
        names = list(inspect.signature(type(optimizer).step).parameters)[1:]
    return names[0] if names else None


def step(
    scaler: Any,
    optimizer: Any,
    stepped: Any,
    closure: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step an optimizer with a closure; return its result, `None` if skipped.

    Gradients that are there before the call are not the scaler's: they are left alone,
    unless `unscale_` was called for them (SAM takes its first step from them). If it
    was, and they are not finite, the closure is not called at all.

    Args:
        scaler: The scaler.
        optimizer: Whose gradients the closure makes.
        stepped: The same, or the wrapper of a package around it.
        closure: Runs the backward pass; the optimizer may call it with arguments.
        args: What else its `step` takes.
        kwargs: The same, by name.
    """
    if id(optimizer) in scaler._iteration.sums:
        message = (
            "accumulate() and a closure do not go together: the closure brings its own "
            "gradients. Add the micro-batches up inside the closure."
        )
        raise ContextError(message)
    flags = scaler._found_inf_per_device(optimizer).values()
    if any(flag.item() for flag in flags):
        return None
    before = _Snapshot(optimizer)

    def checked(*arguments: Any, **keywords: Any) -> Any:
        scaler._rearm(optimizer)
        with torch.enable_grad():
            loss = closure(*arguments, **keywords)
        if scaler._unscale_again(optimizer):
            return loss
        raise _NotFiniteError

    try:
        return stepped.step(checked, *args, **kwargs)
    except _NotFiniteError:
        before.restore()
        return None
    except BaseException:
        before.restore()
        scaler._rearm(optimizer)  # a retry brings its own gradients
        raise


class _Snapshot:
    """The weights and the state of an optimizer, to go back to."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._weights = [
            (parameter, parameter.detach().clone())
            for parameter in parameters(optimizer)
        ]
        self._state = {
            key: copy.deepcopy(value) for key, value in optimizer.state.items()
        }

    def restore(self) -> None:
        """Put everything back, in place."""
        with torch.no_grad():
            for parameter, weight in self._weights:
                parameter.copy_(weight)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
