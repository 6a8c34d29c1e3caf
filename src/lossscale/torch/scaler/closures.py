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

from lossscale.errors import ContextError
from lossscale.torch.parameters import params_of
from lossscale.torch.scaler.fused_optimizers import StepArguments
from lossscale.torch.scaler.iteration import OptimizerStep
from lossscale.torch.scaler.wrapped_optimizers import choose_stepped

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

    A scheduler and Accelerate replace `step` by functions of any arguments; then that
    of the class is asked.
    """
    own_step = inspect.signature(optimizer.step).parameters.values()
    # A scheduler's function says that it has the signature of the unbound method.
    parameters = [parameter for parameter in own_step if parameter.name != "self"]
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        of_class = inspect.signature(type(optimizer).step).parameters.values()
        parameters = list(of_class)[1:]
    return parameters[0].name if parameters else None


def step_with_closure(
    step: OptimizerStep,
    given: torch.optim.Optimizer,
    closure: Closure,
    arguments: StepArguments,
    unscale_and_check: Callable[[], bool],
) -> Any:
    """Step an optimizer with a closure; return its result, `None` if skipped.

    Gradients that are there before the call are not the scaler's: they are left alone,
    unless `unscale_` was called for them (SAM takes its first step from them). If it
    was, and they are not finite, the closure is not called at all.

    Args:
        step: The step of the optimizer whose gradients the closure makes.
        given: The optimizer, or the wrapper of a package around it.
        closure: Runs the backward pass; the optimizer may call it with arguments.
        arguments: What else its `step` takes.
        unscale_and_check: Called after the closure; returns whether the gradients are
            finite.
    """
    if step.accumulator is not None:
        message = (
            "accumulate() and a closure do not go together: the closure brings its "
            "own gradients. Add the micro-batches up inside the closure."
        )
        raise ContextError(message)
    optimizer = step.optimizer
    stepped = given if given is optimizer else choose_stepped(optimizer, given)
    result = None
    if not any(flag.item() for flag in step.found_inf.values()):
        result = _call(step, stepped, closure, arguments, unscale_and_check)
    step.mark_stepped()
    return result


def _call(
    step: OptimizerStep,
    stepped: torch.optim.Optimizer,
    closure: Closure,
    arguments: StepArguments,
    unscale_and_check: Callable[[], bool],
) -> Any:
    """Call the optimizer's step; restore what it changed unless it is completed."""
    snapshot = _Snapshot(step.optimizer)

    def checked_closure(*args: Any, **kwargs: Any) -> Any:
        step.rewind()  # its gradients are new
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
        step.rewind()  # a retry brings its own gradients
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
