# SPDX-License-Identifier: Apache-2.0
"""Optimizers that call the loss themselves: LBFGS, SAM and their kind.

The closure scales its loss, runs `backward` and returns the loss. After each call the
gradients are unscaled and checked. If they are not finite, the optimizer's step ends
where it is: by then it may have moved the weights, so they and the optimizer's state
are restored. So they are if anything is raised in between.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from lossscale.torch.inspection.inspector import params_of
from lossscale.torch.scaler.fused_optimizers import StepArguments

Closure: TypeAlias = Callable[..., Any]


class _NotFiniteError(Exception):
    """Ends an optimizer's step from within its closure."""


def take_closure(
    optimizer: torch.optim.Optimizer, arguments: StepArguments
) -> tuple[Closure | None, StepArguments]:
    """Return the closure among the arguments of a step, and the other arguments.

    A function is one if it is given by that name, or first to an optimizer whose first
    parameter has that name. Any other function is an argument like others.
    """
    args, kwargs = arguments
    closure = kwargs.get("closure")
    if closure is not None:
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return closure, (args, others)
    if args and callable(args[0]) and _first_parameter(optimizer) == "closure":
        return args[0], (args[1:], kwargs)
    return None, arguments


def _first_parameter(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of the first argument that an optimizer's step takes.

    Accelerate replaces `step` by a function of any arguments; then that of the class.
    """
    names = list(inspect.signature(optimizer.step).parameters)
    if names[:1] == ["args"]:
        names = list(inspect.signature(type(optimizer).step).parameters)[1:]
    return names[0] if names else None


def step_with_closure(
    optimizer: torch.optim.Optimizer,
    stepped: torch.optim.Optimizer,
    closure: Closure,
    arguments: StepArguments,
    *,
    rewind: Callable[[], None],
    unscale_and_check: Callable[[], bool],
) -> Any:
    """Step an optimizer with a closure; return its result, `None` if skipped.

    Args:
        optimizer: Whose gradients the closure makes.
        stepped: The same, or the wrapper of a package around it.
        closure: Runs the backward pass; the optimizer may call it with arguments.
        arguments: What else its `step` takes.
        rewind: Called before each call of the closure: its gradients are new.
        unscale_and_check: Called after it; returns whether they are finite.
    """
    snapshot = _Snapshot(optimizer)

    def checked_closure(*args: Any, **kwargs: Any) -> Any:
        rewind()
        with torch.enable_grad():
            loss = closure(*args, **kwargs)
        if unscale_and_check():
            return loss
        raise _NotFiniteError

    args, kwargs = arguments
    try:
        return stepped.step(checked_closure, *args, **kwargs)
    except _NotFiniteError:
        snapshot.restore()
        return None
    except BaseException:
        snapshot.restore()
        rewind()  # a retry brings its own gradients
        raise


class _Snapshot:
    """The weights and the state of an optimizer, to go back to."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [
            (param, param.detach().clone()) for param in params_of(optimizer)
        ]
        self._state = {
            key: copy.deepcopy(value) for key, value in optimizer.state.items()
        }

    def restore(self) -> None:
        """Restore everything, in place."""
        with torch.no_grad():
            for param, weight in self._weights:
                param.copy_(weight)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
