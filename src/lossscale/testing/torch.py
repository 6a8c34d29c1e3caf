# SPDX-License-Identifier: Apache-2.0
"""`inject` for PyTorch: faults in gradients or module outputs, at given steps."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from lossscale.core.validation import check_choice, format_value
from lossscale.errors import ContextError, GradientError, SettingTypeError
from lossscale.testing.faults import Fault, FaultValue, check_name


def inject(
    target: torch.nn.Module | torch.optim.Optimizer,
    name: str,
    value: FaultValue,
    *,
    steps: int | Iterable[int],
    where: str = "gradient",
    element: int | None = 0,
) -> "Injection":
    """Return a context in which a named tensor gets a fault at given steps.

    A step is a backward pass that reaches the parameter, or a forward pass of the
    module, counted from 1 in the context. With accumulation every micro-batch counts.

    Args:
        target: A module, or an optimizer.
        name: Which tensor: a parameter, as `named_parameters` writes it, or with
            `where="output"` a module, as `named_modules` writes it (`""` is the target
            itself). An optimizer's parameters have the names it was given, or else
            `"param_groups[0]['params'][1]"`.
        value: "inf", "-inf", "nan", "huge" (the largest finite number of the dtype) or
            a number.
        steps: The steps at which the fault is written, from 1.
        where: "gradient" writes into `param.grad`, still scaled, when the backward pass
            has accumulated it. "output" writes into what the module returns; the
            gradient passes as if nothing had been written.
        element: Which number of the tensor, counted as in `flatten`; `None` for all.

    Raises:
        SettingError: If there is no such tensor, element, step or fault.
        SettingTypeError: If the target is no module or optimizer, or the tensor is not
            floating-point.
        ContextError: At the end of the context, if there were too few steps.

    Example:
        >>> import torch
        >>> from lossscale.testing.torch import inject
        >>> model = torch.nn.Linear(2, 1)
        >>> with inject(model, "weight", "nan", steps=2):
        ...     for _ in range(2):
        ...         model.zero_grad()
        ...         model(torch.ones(1, 2)).sum().backward()
        ...         print(model.weight.grad.tolist())
        [[1.0, 1.0]]
        [[nan, 1.0]]
    """
    fault = Fault.check(value, steps, element)
    check_choice("where", where, ("gradient", "output"))
    if where == "output":
        return _inject_into_output(target, name, fault)
    params = _list_params(target)
    param = params[check_name(name, list(params), "parameters")]
    fault.number(name, _dtype_of(param))
    fault.check_size(name, param.numel())
    return Injection(name, fault, lambda write: _hook_gradient(param, write))


class Injection:
    """A context in which a fault is written; `inject` makes it.

    Example:
        >>> import torch
        >>> from lossscale.testing.torch import inject
        >>> model = torch.nn.Linear(2, 1)
        >>> with inject(model, "", "inf", steps=[1, 3], where="output") as injection:
        ...     for _ in range(3):
        ...         loss = model(torch.ones(1, 2)).sum()
        >>> injection.written
        (1, 3)
    """

    def __init__(
        self,
        name: str,
        fault: Fault,
        register: Callable[[Callable[[Any], Any]], Any],
    ) -> None:
        """Prepare; nothing is hooked yet."""
        self._name = name or "the module"
        self._fault = fault
        self._register = register
        self._handle: Any = None
        self.taken = 0
        """How many steps there were in the context."""
        self.written: tuple[int, ...] = ()
        """The steps at which the fault was written."""

    def __enter__(self) -> "Injection":  # noqa: PYI034  # Python 3.10 has no Self
        """Hook the tensor."""
        if self._handle is not None:
            message = f"The fault in {self._name} is being injected already."
            raise ContextError(message)
        self.taken, self.written = 0, ()
        self._handle = self._register(self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the hook; raise if the last fault was never written."""
        self._handle.remove()
        self._handle = None
        if error is None:
            self._fault.check_reached(self._name, self.taken)

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a step; return the tensor to go on with."""
        self.taken += 1
        if self.taken not in self._fault.steps:
            return tensor
        number = self._fault.number(self._name, _dtype_of(tensor))
        self._fault.check_size(self._name, tensor.numel())
        self.written += (self.taken,)
        written: torch.Tensor = _Write.apply(  # type: ignore[no-untyped-call]
            tensor, number, self._fault.element
        )
        return written


class _Write(torch.autograd.Function):
    """Write a number; the gradient passes unchanged."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, number: float, element: int | None
    ) -> torch.Tensor:
        del ctx
        result = tensor.clone(memory_format=torch.contiguous_format)
        result.view(-1)[slice(None) if element is None else element] = number
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        del ctx
        return grads[0], None, None


def _hook_gradient(
    param: torch.Tensor, write: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    @torch.no_grad()
    def hook(param: torch.Tensor) -> None:
        grad = param.grad
        if grad is None:
            return
        stored = grad._values() if grad.is_sparse else grad  # noqa: SLF001  # as stored
        written = write(stored)
        if written is not stored:
            stored.copy_(written)

    return param.register_post_accumulate_grad_hook(hook)


def _inject_into_output(target: Any, name: str, fault: Fault) -> Injection:
    if not isinstance(target, torch.nn.Module):
        message = (
            "where='output' needs a module, whose output is written into; got "
            f"{format_value(target)} ({type(target).__name__})."
        )
        raise SettingTypeError(message)
    modules = dict(target.named_modules())
    module = modules[check_name(name, list(modules), "modules")]

    def register(write: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
            del module, args
            return _replace_first(output, write, name)

        return module.register_forward_hook(hook)

    return Injection(name, fault, register)


def _replace_first(
    output: Any, write: Callable[[torch.Tensor], torch.Tensor], name: str
) -> Any:
    """Return an output in which the first floating-point tensor is replaced."""
    leaves, structure = torch.utils._pytree.tree_flatten(output)  # noqa: SLF001
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[index] = write(leaf)
            return torch.utils._pytree.tree_unflatten(leaves, structure)  # noqa: SLF001
    message = (
        f"{name or 'The module'} returned no floating-point tensor: "
        f"{format_value(output)}."
    )
    raise GradientError(message)


def _list_params(target: Any) -> dict[str, torch.Tensor]:
    """Return parameters by name."""
    if isinstance(target, torch.nn.Module):
        return dict(target.named_parameters())
    if isinstance(target, torch.optim.Optimizer):
        return {
            _name(group, number, index): param
            for number, group in enumerate(target.param_groups)
            for index, param in enumerate(group["params"])
        }
    message = (
        "The target must be a torch.nn.Module or a torch.optim.Optimizer, got "
        f"{format_value(target)} ({type(target).__name__})."
    )
    raise SettingTypeError(message)


def _name(group: dict[str, Any], number: int, index: int) -> str:
    if group.get("param_names") is not None:
        return str(group["param_names"][index])
    return f"param_groups[{number}]['params'][{index}]"


def _dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
