# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper: scale the loss, unscale the gradients, skip overflows."""

from collections.abc import Callable, Iterable
from functools import partial
from inspect import unwrap
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard

from lossscale.core import validation
from lossscale.core.classic.binding import Binding
from lossscale.core.classic.loss_scales import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    get,
)
from lossscale.core.classic.managers import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from lossscale.core.state import Array, Signal
from lossscale.core.validation import format_value
from lossscale.errors import SettingError, SettingTypeError


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
        scale = self._find_scale(loss_scale_manager)
        validation.check_bool("skip_nonfinite", skip_nonfinite)
        self._adopt(opt)
        self._skip_nonfinite = skip_nonfinite
        self._loss_scale = scale

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
        scaled = self._scale_loss(loss, scale)
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
        and step counters stay as they are. If it raises, the scale does not move. A
        step is also skipped for a finite gradient that is too large for the optimizer;
        the scale and its counters then stay, because no lower scale would help.

        Args:
            grads_and_vars: Pairs of gradient and variable; an iterator will do.
                Pairs whose gradient is `None` are left out.
            *arguments: Anything else that the wrapped optimizer takes, such as
                `global_step`.
            **keywords: The same, by name.
        """
        pairs = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]

        def step(gradients: list[Any], variables: list[Any]) -> Any:
            return self._step(gradients, variables, *arguments, **keywords)

        return self._binding.across_replicas(step, gradients, variables)

    def _step(
        self,
        gradients: list[Any],
        variables: list[Any],
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        """Apply gradients or skip the step, once for all replicas."""

        def apply(gradients: list[Any], variables: list[Any]) -> Any:
            pairs = self._prepare(list(zip(gradients, variables, strict=True)))
            return self._optimizer.apply_gradients(pairs, *arguments, **keywords)

        applicable = self._can_be_applied(gradients, variables)
        permitted, update = self._decide(applicable, gradients)
        return self._binding.transaction(
            permitted,
            lambda: self._binding.in_each_replica(apply, gradients, variables),
            lambda: self._skip(*arguments, **keywords),
            lambda: self._are_finite(gradients),
            update,
        )

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
        options = {"global_step": global_step, "name": name}
        return self.apply_gradients(
            pairs, **{key: value for key, value in options.items() if value is not None}
        )

    def _find_scale(self, loss_scale: Any) -> LossScaleManager | LossScale:
        """Return the scale that was given, or that a number or "dynamic" means."""
        if isinstance(loss_scale, LossScaleManager):
            return loss_scale
        try:
            converted = get(loss_scale, self._fixed_class, self._dynamic_class)
        except SettingError:
            if isinstance(loss_scale, (int, float)):
                raise  # a number that cannot be a scale
            raise SettingError(_describe_scale(loss_scale)) from None
        if converted is None:
            message = 'loss_scale cannot be None; pass a number or "dynamic".'
            raise SettingError(message)
        return converted

    def _adopt(self, opt: Any) -> None:
        """Keep the optimizer, after every argument was checked."""
        self._optimizer = opt

    def _check_optimizer(self, opt: Any) -> None:
        """Raise if this is nothing that can be wrapped."""
        if isinstance(opt, LossScaleOptimizer):
            message = (
                f"opt is a {type(opt).__name__}, which scales its loss already. Wrap "
                "the optimizer inside it."
            )
            raise SettingError(message)
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

    def _are_finite(self, gradients: list[Any]) -> Array:
        """Return whether gradients that cannot be applied are finite all the same."""
        return self._binding.all_finite(gradients)

    def _prepare(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return pairs of gradient and variable as the wrapped optimizer takes them."""
        return pairs

    def _skip(self, *arguments: Any, **keywords: Any) -> Any:
        """Do what a skipped step does in place of applying: nothing."""

    def _scale_loss(self, loss: Any, scale: Array) -> Any:
        """Return a loss, or a callable that returns one, times the scale."""
        if callable(loss):
            return lambda: self._binding.scale_loss(loss(), scale)
        return self._binding.scale_loss(loss, scale)

    def _current(self) -> Array:
        """Return the scale to use in this step."""
        scale = self._loss_scale
        if isinstance(scale, LossScaleManager):
            method, value = "get_loss_scale", scale.get_loss_scale()
        else:
            method, value = "__call__", scale()
        if _is_ours(scale):
            return value
        try:
            return self._binding.as_scale(value)
        except (TypeError, ValueError):
            message = (
                f"{type(scale).__name__}.{method}() returned {format_value(value)}, "
                "expected a float32 scalar."
            )
            raise SettingTypeError(message) from None

    def _decide(
        self, applicable: Array, gradients: list[Any]
    ) -> tuple[Any, Callable[[Array | None], Any]]:
        """Return whether the gradients may be applied, and what updates the scale.

        A manager has no say in applying: it always skipped. Our own loss scales say
        what they will say before they move, so that they can move last. A custom one
        speaks only by moving, so it moves first. None is asked, and none moves, if the
        gradients are finite and too large for the optimizer.
        """
        scale = self._loss_scale
        if _is_ours(scale):
            always = isinstance(scale, FixedLossScale) and not self._skip_nonfinite
            permitted = self._binding.flag(True) if always else applicable
            return permitted, lambda too_large: scale.update_from_signal(
                Signal(applicable, too_large=too_large)
            )
        if isinstance(scale, LossScaleManager):
            return applicable, partial(self._update_custom_manager, scale, applicable)
        too_large = self._are_finite(gradients) & ~applicable
        permitted = self._binding.unless(too_large, lambda: self._ask(scale, gradients))
        if self._skip_nonfinite:
            permitted = permitted & applicable
        return permitted, lambda _: None

    def _ask(self, scale: LossScale, gradients: list[Any]) -> tuple[Any, Array]:
        """Update a loss scale of the user's, and return its answer."""
        answer = scale.update(gradients)
        try:
            operation, permitted = answer
            return operation, self._binding.flag(permitted)
        except (TypeError, ValueError):
            message = (
                f"{type(scale).__name__}.update() returned {format_value(answer)}, "
                "expected (update_op, should_apply_gradients), the second of them one "
                "boolean."
            )
            raise SettingTypeError(message) from None

    def _update_custom_manager(
        self, manager: LossScaleManager, applied: Array, too_large: Array | None
    ) -> Any:
        """Give a manager of the user's the flag, unless the step was too large."""
        if too_large is None:
            return manager.update_loss_scale(applied)
        return self._binding.unless(
            too_large, lambda: (manager.update_loss_scale(applied), True)
        )


def _describe_scale(loss_scale: Any) -> str:
    """Return the error about something that is no loss scale."""
    kind = type(loss_scale)
    library = kind.__module__.partition(".")[0]
    if library == "tensorflow" and kind.__name__ in (
        "DynamicLossScale",
        "FixedLossScale",
    ):
        return (
            f"The loss scale is TensorFlow's own {kind.__name__}, expected one of "
            f"lossscale. Convert it: {kind.__name__}.from_config(scale.get_config())."
        )
    return (
        'A loss scale is a manager, a LossScale, a Python number or "dynamic"; got '
        f"{format_value(loss_scale)} ({kind.__name__})."
    )


_Ours: TypeAlias = (
    FixedLossScale
    | DynamicLossScale
    | FixedLossScaleManager
    | ExponentialUpdateLossScaleManager
)


def _is_ours(scale: LossScaleManager | LossScale) -> TypeGuard[_Ours]:
    """Whether a scale is one of our classes, without an update of its own."""
    for original, methods in _METHODS.items():
        if isinstance(scale, original):
            return all(
                # A framework's decorator around our own method leaves it ours.
                unwrap(getattr(type(scale), name)) is getattr(original, name)
                for name in methods
            )
    return False


_METHODS: dict[type, tuple[str, ...]] = {
    FixedLossScale: ("update", "update_from_finite"),
    DynamicLossScale: ("update", "update_from_finite"),
    FixedLossScaleManager: ("update_loss_scale",),
    ExponentialUpdateLossScaleManager: ("update_loss_scale",),
}
"""By what each of our classes is updated."""
