# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper: scale the loss, unscale the gradients, skip overflows."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lossscale.core import classic
from lossscale.errors import SettingError, SettingTypeError, StateError
from lossscale.torch import functional
from lossscale.torch.classic.binding import BINDING, check_keys
from lossscale.torch.classic.loss_scales import DynamicLossScale, FixedLossScale
from lossscale.torch.classic.wrapped_optimizer import WrappedOptimizer


class LossScaleOptimizer(classic.LossScaleOptimizer):
    """An optimizer that scales its loss and never applies non-finite gradients.

    It wraps any `torch.optim.Optimizer` whose `step` needs no closure, and any object
    with `compute_gradients` and `apply_gradients`. A training loop is written in
    either style: `minimize(loss)`, or `backward(loss)` and `step()`.

    A gradient counts as an overflow if it is not finite in the dtype of its parameter,
    or so large that the optimizer's own arithmetic would make it infinite: a second
    moment that overflows never comes back. To decide, a step waits for the device
    once; `GradScaler` can do without that where the optimizer is fused.

    A learning-rate scheduler takes the optimizer inside, `wrapper.optimizer`. With
    DistributedDataParallel use `backward` and `step`: its gradients are averaged in
    the backward pass only.

    Example:
        >>> import torch, lossscale.torch.classic as ls
        >>> weight = torch.nn.Parameter(torch.tensor(5.0))
        >>> descent = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = ls.LossScaleOptimizer(descent, "dynamic")
        >>> optimizer.zero_grad()
        >>> optimizer.backward(3.0 * weight)
        >>> optimizer.step()
        >>> weight.item()
        2.0
    """

    _binding = BINDING
    _fixed_class = FixedLossScale
    _dynamic_class = DynamicLossScale
    _optimizer: Any

    def __init__(
        self,
        opt: Any,
        loss_scale_manager: classic.LossScaleManager | classic.LossScale | float | str,
        *,
        skip_nonfinite: bool = True,
    ) -> None:
        """Wrap an optimizer.

        Args:
            opt: The optimizer to wrap.
            loss_scale_manager: A manager, a LossScale, a number, or "dynamic".
            skip_nonfinite: Whether a step with non-finite gradients is skipped even
                where the LossScale would let it pass, as a fixed one does. False
                applies them, as the later originals did. With a manager such a step
                is always skipped.

        Raises:
            SettingError: If either argument is of another kind (a ValueError).
        """
        if isinstance(opt, classic.LossScaleOptimizer):
            message = "opt scales its loss already. Pass the optimizer inside it."
            raise SettingError(message)
        inner = WrappedOptimizer(opt) if isinstance(opt, torch.optim.Optimizer) else opt
        super().__init__(inner, loss_scale_manager, skip_nonfinite=skip_nonfinite)

    @property
    def optimizer(self) -> Any:
        """The optimizer inside, for learning-rate schedulers and hooks."""
        inner = self._optimizer
        return inner.optimizer if isinstance(inner, WrappedOptimizer) else inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer inside."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside, by parameter."""
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, as the optimizer inside does."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, loss: Any, **keywords: Any) -> None:
        """Run the backward pass of the scaled loss: scaled gradients add up in `.grad`.

        The scale moves in `step` alone, so micro-batches that are added up share it.

        Args:
            loss: A tensor.
            **keywords: What `torch.Tensor.backward` takes.
        """
        self._scale_loss(loss, self._current()).backward(**keywords)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale every `.grad`, take a step if all are finite, and move the scale.

        Afterwards `.grad` holds what was applied, unscaled. In a skipped step nothing
        is called, and `.grad` stays as it was, scaled. If the optimizer raises, the
        scale does not move and `.grad` is as before.

        Args:
            closure: Called once, before the gradients are checked; it calls
                `zero_grad` and `backward` and returns the loss.

        Returns:
            The closure's loss, or what the optimizer's `step` returns; `None` if the
            step was bad.

        Raises:
            StructureError: If no parameter has a gradient (a ValueError).
        """
        wrapped_optimizer = self._get_wrapped_optimizer("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [
            param for param, _ in wrapped_optimizer.groups() if param.grad is not None
        ]
        scaled = [param.grad.detach() for param in parameters]
        unscaled = self._binding.unscale(scaled, self._current())
        applied = self._apply(wrapped_optimizer, zip(unscaled, parameters, strict=True))
        if applied is None:
            return None
        return applied[0] if closure is None else loss

    def compute_gradients(
        self, loss: Any, var_list: Any = None, *arguments: Any, **keywords: Any
    ) -> list[tuple[Any, Any]]:
        """Return unscaled gradients with their parameters; no `.grad` is touched.

        float16 and bfloat16 gradients come back in float32, so that clipping them loses
        nothing. A parameter that the loss does not depend on has the gradient `None`.

        Args:
            loss: The loss, or a callable that returns it.
            var_list: The parameters; all that require a gradient unless given.
            *arguments: Anything else that an optimizer which is not torch's takes.
            **keywords: The same, by name; for torch's, what `torch.autograd.grad`
                takes, such as `retain_graph`.
        """
        return super().compute_gradients(loss, var_list, *arguments, **keywords)

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """Apply unscaled gradients if they are finite, then update the loss scale.

        The gradients become the `.grad` of their parameters, in their dtype; a
        parameter without one has `None` there, and is left alone by the step. On a bad
        step nothing is called and every `.grad` stays: weights, slots and step counters
        are untouched. If the optimizer raises, the scale does not move and every
        `.grad` is as before.

        Args:
            grads_and_vars: Pairs of gradient and parameter; an iterator will do.
            *arguments: Anything else that an optimizer which is not torch's takes.
            **keywords: The same, by name.

        Returns:
            What the optimizer's step returns; `None` if the step was bad.

        Raises:
            GradientError: If a gradient is not floating-point (a TypeError).
            SettingTypeError: If torch's optimizers have no such argument.
            StructureError: If no parameter has a gradient, if one is given twice or is
                not the optimizer's, or if a gradient has another shape than its
                parameter (a ValueError).
        """
        if not isinstance(self._optimizer, WrappedOptimizer):
            return super().apply_gradients(grads_and_vars, *arguments, **keywords)
        if arguments or keywords:
            message = (
                f"{[*arguments, *keywords]} are arguments for optimizers of "
                "TensorFlow; torch's take none but the gradients."
            )
            raise SettingTypeError(message)
        applied = self._apply(self._optimizer, grads_and_vars)
        return None if applied is None else applied[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer inside and of the loss scale.

        Raises:
            StateError: If either of them has no `state_dict`.
        """
        owners = {"optimizer": self.optimizer, "loss_scale": self._loss_scale}
        return {name: _method(owner, "state_dict")() for name, owner in owners.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state of both.

        Raises:
            StateError: If it is malformed or foreign; then nothing has changed.
        """
        check_keys(state_dict, dict.fromkeys(("optimizer", "loss_scale")))
        wrapped_optimizer = self._get_wrapped_optimizer("load_state_dict")
        load_scale = _method(self._loss_scale, "load_state_dict")
        before = wrapped_optimizer.contents()
        wrapped_optimizer.load_state_dict(state_dict["optimizer"])
        try:
            load_scale(state_dict["loss_scale"])
        except BaseException:
            wrapped_optimizer.restore(before)
            raise

    def _apply(
        self, wrapped_optimizer: WrappedOptimizer, pairs: Iterable[Any]
    ) -> tuple[Any] | None:
        """Return the result of the step in a tuple, or `None` if it was bad."""
        applied: tuple[Any] | None = super().apply_gradients(
            wrapped_optimizer.prepare(pairs)
        )
        return applied

    def _get_wrapped_optimizer(self, method: str) -> WrappedOptimizer:
        """Return the torch optimizer inside, or raise if it is something else."""
        if isinstance(self._optimizer, WrappedOptimizer):
            return self._optimizer
        message = (
            f"{method} is for optimizers of torch.optim, and this one wraps a "
            f"{type(self._optimizer).__name__}. Use minimize or apply_gradients."
        )
        raise SettingError(message)

    def _can_be_applied(self, gradients: list[Any], variables: list[Any]) -> Any:
        """Return whether the gradients are finite, and stay so when applied."""
        if not isinstance(self._optimizer, WrappedOptimizer):
            return super()._can_be_applied(gradients, variables)
        flags = self._optimizer.is_finite(gradients, variables)
        return functional.all_true(flags, torch.device("cpu"))


def _method(owner: Any, name: str) -> Callable[..., Any]:
    """Return a method that saves or loads, or say that it is missing."""
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if not callable(method):
        message = (
            f"{type(owner).__name__} has no {name}, so its state cannot be saved and "
            "loaded. Give it state_dict() and load_state_dict(state_dict)."
        )
        raise StateError(message)
    return method
