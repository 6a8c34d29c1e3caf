# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper: scale the loss, unscale the gradients, skip the bad step."""

from collections.abc import Iterable
from inspect import unwrap
from typing import Any, ClassVar, Protocol

from lossscale.core import checks
from lossscale.core.classic.binding import Binding
from lossscale.core.classic.loss_scales import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    get,
)
from lossscale.core.classic.managers import LossScaleManager
from lossscale.core.errors import SettingError
from lossscale.core.state import Array


class Optimizer(Protocol):
    """What the wrapper needs of the optimizer inside it."""

    def compute_gradients(
        self, loss: Any, var_list: Any = None, *arguments: Any, **keywords: Any
    ) -> Iterable[Any]:
        """Return pairs of gradient and variable."""
        ...

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """Apply pairs of gradient and variable."""
        ...


class LossScaleOptimizer:
    """An optimizer that scales its loss and never applies non-finite gradients."""

    _binding: ClassVar[Binding]
    _fixed_class: ClassVar[type[FixedLossScale]]
    _dynamic_class: ClassVar[type[DynamicLossScale]]

    def __init__(
        self,
        opt: Optimizer,
        loss_scale_manager: LossScaleManager | LossScale | float | str,
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
        self._check_optimizer(opt)
        self._optimizer = opt
        self._skip_nonfinite = checks.switch("skip_nonfinite", skip_nonfinite)
        self._loss_scale: LossScaleManager | LossScale
        if isinstance(loss_scale_manager, LossScaleManager):
            self._loss_scale = loss_scale_manager
            return
        found = get(loss_scale_manager, self._fixed_class, self._dynamic_class)
        if found is None:
            message = 'The loss scale cannot be None; pass a number or "dynamic".'
            raise SettingError(message)
        self._loss_scale = found

    @property
    def loss_scale(self) -> LossScaleManager | LossScale:
        """The manager or LossScale that decides the scale."""
        return self._loss_scale

    def compute_gradients(
        self, loss: Any, var_list: Any = None, *arguments: Any, **keywords: Any
    ) -> list[tuple[Any, Any]]:
        """Return unscaled gradients with their variables.

        Args:
            loss: The loss, or a callable that returns it, as the wrapped optimizer
                takes it.
            var_list: The variables, as the wrapped optimizer takes them.
            *arguments: Anything else that the wrapped optimizer takes.
            **keywords: Anything else that the wrapped optimizer takes.
        """
        scale = self._current()
        scaled = self._scaled(loss, scale)
        pairs = self._optimizer.compute_gradients(
            scaled, var_list, *arguments, **keywords
        )
        gradients, variables = [], []
        for gradient, variable in pairs:
            gradients.append(gradient)
            variables.append(variable)
        unscaled = self._binding.unscale(gradients, scale)
        return list(zip(unscaled, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """Apply unscaled gradients if they are finite, then update the loss scale.

        On a skipped step the wrapped optimizer is not called at all: weights, slots
        and step counters stay as they are. If it raises, the scale does not move.

        Args:
            grads_and_vars: Pairs of gradient and variable; an iterator will do.
                Pairs whose gradient is `None` are left out.
            *arguments: Anything else that the wrapped optimizer takes, such as
                `global_step`.
            **keywords: The same, by name.
        """
        pairs = [(grad, var) for grad, var in grads_and_vars if grad is not None]

        def apply(gradients: list[Any], variables: list[Any]) -> Any:
            own = list(zip(gradients, variables, strict=True))
            return self._optimizer.apply_gradients(own, *arguments, **keywords)

        def step(gradients: list[Any], variables: list[Any]) -> Any:
            finite = self._can_be_applied(gradients, variables)
            permitted, update = self._decide(finite, gradients)
            if self._skip_nonfinite:
                permitted = permitted & finite
            return self._binding.transaction(
                permitted,
                lambda: self._binding.in_each_replica(apply, gradients, variables),
                lambda: self._skip(*arguments, **keywords),
                update,
            )

        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        return self._binding.across_replicas(step, gradients, variables)

    def minimize(
        self,
        loss: Any,
        global_step: Any = None,
        var_list: Any = None,
        *,
        name: str | None = None,
        **keywords: Any,
    ) -> Any:
        """Compute gradients, then apply them.

        Args:
            loss: As for `compute_gradients`.
            global_step: Handed to the wrapped optimizer's `apply_gradients`.
            var_list: As for `compute_gradients`.
            name: Handed to the wrapped optimizer's `apply_gradients`.
            **keywords: As for `compute_gradients`.
        """
        pairs = self.compute_gradients(loss, var_list, **keywords)
        # Only what was given: not every optimizer counts steps or has names.
        given = {"global_step": global_step, "name": name}
        return self.apply_gradients(
            pairs, **{key: value for key, value in given.items() if value is not None}
        )

    def _check_optimizer(self, opt: Any) -> None:
        """Raise if this is nothing that can be wrapped."""
        for method in ("compute_gradients", "apply_gradients"):
            if not callable(getattr(opt, method, None)):
                message = (
                    f"opt must be an optimizer with compute_gradients and "
                    f"apply_gradients, got {opt!r}."
                )
                raise SettingError(message)

    def _can_be_applied(self, gradients: list[Any], variables: list[Any]) -> Array:
        """Return whether the gradients are finite, and stay so when applied."""
        del variables
        return self._binding.all_finite(gradients)

    def _skip(self, *arguments: Any, **keywords: Any) -> Any:
        """Do what a skipped step does in place of applying: nothing."""

    def _scaled(self, loss: Any, scale: Array) -> Any:
        """Return a loss, or a callable that returns one, times the scale."""
        if callable(loss):
            return lambda: self._binding.scale_loss(loss(), scale)
        return self._binding.scale_loss(loss, scale)

    def _current(self) -> Array:
        """Return the scale to use in this step."""
        if isinstance(self._loss_scale, LossScaleManager):
            return self._loss_scale.get_loss_scale()
        return self._loss_scale()

    def _decide(self, finite: Array, gradients: list[Any]) -> tuple[Any, Any]:
        """Return whether the gradients may be applied, and what updates the scale.

        A manager has no say in applying: it always skipped. Our own loss scales say
        what they will say before they move, so that they can move last. A custom one
        speaks only by moving, so it moves first.
        """
        scale = self._loss_scale
        if isinstance(scale, LossScaleManager):
            return finite, lambda: scale.update_loss_scale(finite)
        if isinstance(scale, (FixedLossScale, DynamicLossScale)) and not _overrides(
            scale
        ):
            always = isinstance(scale, FixedLossScale)
            permitted = self._binding.flag(True) if always else finite
            return permitted, lambda: scale.update_from_finite(finite)[0]
        operation, should_apply = scale.update(gradients)
        return self._binding.flag(should_apply), lambda: operation


def _overrides(scale: FixedLossScale | DynamicLossScale) -> bool:
    """Whether a subclass has an update of its own."""
    original = FixedLossScale if isinstance(scale, FixedLossScale) else DynamicLossScale
    return any(
        # A framework's decorator around our own method does not make it another.
        unwrap(getattr(type(scale), name)) is not getattr(original, name)
        for name in ("update", "update_from_finite")
    )
