# SPDX-License-Identifier: Apache-2.0
"""An optimizer of `torch.optim` in the shape that the classic wrapper calls.

Gradients come from `torch.autograd.grad` and go into the step by way of `.grad`. A step
that raises leaves every `.grad` as it was.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lossscale.errors import SettingError, StateError, StructureError
from lossscale.torch import gradient as gradient_ops
from lossscale.torch.inspection.headroom import class_with_step, find_bounds


class WrappedOptimizer:
    """A `torch.optim.Optimizer` with `compute_gradients` and `apply_gradients`."""

    def __init__(self, optimizer: Any) -> None:
        parameter = inspect.signature(optimizer.step).parameters.get("closure")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            message = (
                f"opt ({type(optimizer).__name__}) evaluates the loss inside its step, "
                "where this wrapper cannot unscale. Use "
                "GradScaler.step(opt, closure=...)."
            )
            raise SettingError(message)
        self.optimizer = optimizer
        for param, group in self.groups():
            _check_epsilon(optimizer, param, group)

    def groups(self) -> list[tuple[Any, Mapping[str, Any]]]:
        """Return every parameter with the settings of its group."""
        groups = self.optimizer.param_groups
        return [(param, group) for group in groups for param in group["params"]]

    def compute_gradients(
        self, loss: Any, var_list: Any = None, **keywords: Any
    ) -> list[tuple[Any, Any]]:
        """Return pairs of gradient and parameter; `None` where the loss has none."""
        with torch.enable_grad():
            value = loss() if callable(loss) else loss
        if var_list is None:
            var_list = [param for param, _ in self.groups() if param.requires_grad]
        parameters = list(var_list)
        grads = torch.autograd.grad(value, parameters, allow_unused=True, **keywords)
        return list(zip(grads, parameters, strict=True))

    def apply_gradients(self, grads_and_vars: Iterable[Any]) -> tuple[Any]:
        """Take a step with these gradients alone; the result is a tuple."""
        before = [(param, param.grad) for param, _ in self.groups()]
        try:
            for param, _ in before:
                param.grad = None
            for gradient, param in grads_and_vars:
                param.grad = gradient
            return (self.optimizer.step(),)
        except BaseException:
            for param, gradient in before:
                param.grad = gradient
            raise

    def prepare(self, pairs: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Return pairs whose gradients have the dtype and device of their parameter.

        What overflows by that is seen by the finite check, which comes after.
        """
        remaining = {id(param): index for index, (param, _) in enumerate(self.groups())}
        prepared = []
        for gradient, param in pairs:
            index = remaining.pop(id(param), None)
            if index is None:
                message = (
                    f"grads_and_vars has {_describe(param)}, which is not a parameter "
                    "of the optimizer or appears twice. Pass each parameter once."
                )
                raise StructureError(message)
            if gradient is not None:
                prepared.append(
                    (_as_parameter(gradient, param, f"parameter {index}"), param)
                )
        if not prepared:
            message = (
                "There is no gradient for any parameter of the optimizer. Check that "
                "the loss depends on them, and that backward came before step."
            )
            raise StructureError(message)
        return prepared

    def is_finite(self, gradients: list[Any], parameters: list[Any]) -> list[Any]:
        """Return of each gradient whether it is finite, and stays so in the step."""
        bounds = find_bounds(self.optimizer, parameters)
        return [
            gradient_ops.is_finite(gradient, bound)
            for gradient, bound in zip(gradients, bounds, strict=True)
        ]

    def load_state_dict(self, saved: Any) -> None:
        """Load a saved state, or raise a `StateError` and change nothing."""
        before = self.contents()
        try:
            self.optimizer.load_state_dict(saved)
        except Exception as error:
            self.restore(before)
            message = (
                f"The state of {type(self.optimizer).__name__} cannot be loaded: "
                f"{error!r}. Nothing was loaded."
            )
            raise StateError(message) from error

    def contents(self) -> dict[str, Any]:
        """Return what loading a state replaces."""
        return {name: getattr(self.optimizer, name) for name in _CONTENTS}

    def restore(self, contents: dict[str, Any]) -> None:
        """Undo the loading of a state."""
        vars(self.optimizer).update(contents)


_CONTENTS = ("state", "param_groups")


def _as_parameter(gradient: Any, parameter: Any, name: str) -> torch.Tensor:
    """Return a gradient as the `.grad` of its parameter has to be."""
    checked = gradient_ops.check(name, gradient)
    if checked.shape != parameter.shape:
        message = (
            f"The gradient of {name} has the shape {tuple(checked.shape)}, and its "
            f"parameter {tuple(parameter.shape)}."
        )
        raise StructureError(message)
    if checked.is_complex() and not parameter.is_complex():
        message = f"The gradient of {name} is complex, and its parameter is not."
        raise StructureError(message)
    upcast_grad = gradient_ops.coalesce(gradient_ops.upcast(checked.detach()))
    return gradient_ops.check(name, upcast_grad.to(parameter.device, parameter.dtype))


def _check_epsilon(optimizer: Any, parameter: Any, group: Mapping[str, Any]) -> None:
    """Raise if a second moment that vanishes in float16 would be divided by.

    The square of a gradient below 2**-12 is 0 in float16, and so is the usual epsilon.
    The fused kernels compute in float32.
    """
    epsilon = group.get("eps")
    is_narrow = parameter.dtype is torch.float16 and not group.get("fused")
    is_small = isinstance(epsilon, float) and epsilon < _SMALLEST_EPSILON
    if is_narrow and is_small and class_with_step(optimizer) in _DIVIDING:
        message = (
            f"eps={epsilon!r} is too small for float16 parameters: "
            f"{type(optimizer).__name__} would divide by zero. Pass eps=1e-4, or "
            "keep the parameters in float32 and run the model under torch.autocast."
        )
        raise SettingError(message)


_SMALLEST_EPSILON = 2.0**-20
"""With a smaller one, quotients may be beyond float16."""

_DIVIDING = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SparseAdam,
)
"""Optimizers that divide by a moment in the dtype of the parameter."""


def _describe(parameter: Any) -> str:
    """Say which thing this is, without its numbers."""
    if isinstance(parameter, torch.Tensor):
        return f"a {parameter.dtype} tensor of shape {tuple(parameter.shape)}"
    return type(parameter).__name__
