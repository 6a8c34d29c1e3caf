# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper: scale the loss, unscale the gradients, skip the bad step."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from lossscale.core import classic, headroom, validation
from lossscale.core.state import Array
from lossscale.errors import SettingError, SettingTypeError, StructureError
from lossscale.tensorflow import inner, leaves, replicas, verbs
from lossscale.tensorflow.autograph import unconverted, unconverted_methods
from lossscale.tensorflow.binding import BINDING
from lossscale.tensorflow.classic import DynamicLossScale, FixedLossScale


@unconverted_methods(
    "compute_gradients",
    "apply_gradients",
    "minimize",
    "get_scaled_loss",
    "get_unscaled_gradients",
)
class LossScaleOptimizer(classic.LossScaleOptimizer, tf.compat.v1.train.Optimizer):
    """An optimizer that scales its loss and never applies non-finite gradients.

    It wraps an optimizer of `tf.compat.v1.train`, of Keras 3 or of tf_keras, works
    eagerly, in graphs and in `tf.function`, and under distribution strategies, where
    one bad replica makes the step bad for all. It is a `tf.compat.v1.train.Optimizer`
    and can be put into a `tf.train.Checkpoint`.

    Example:
        >>> import tensorflow as tf, lossscale.tensorflow as ls
        >>> weight = tf.Variable(5.0)
        >>> descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        >>> optimizer = ls.LossScaleOptimizer(descent, "dynamic")
        >>> optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])
        >>> float(weight)
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
        count_skipped_steps: bool = False,
    ) -> None:
        """Wrap an optimizer.

        Args:
            opt: The optimizer to wrap.
            loss_scale_manager: A manager, a LossScale, a number, or "dynamic".
            skip_nonfinite: Whether a step with non-finite gradients is skipped even
                where the LossScale would let it pass, as a fixed one does. False
                applies them, as the later originals did. With a manager such a step
                is always skipped.
            count_skipped_steps: Whether `global_step` (or the `iterations` of a Keras
                optimizer) moves on a skipped step too, as in tf.keras from 2.3 on.

        Raises:
            SettingError: If either argument is of another kind (a ValueError).
        """
        classic.LossScaleOptimizer.__init__(
            self, opt, loss_scale_manager, skip_nonfinite=skip_nonfinite
        )
        self._count_skipped_steps = validation.check_bool(
            "count_skipped_steps", count_skipped_steps
        )
        tf.compat.v1.train.Optimizer.__init__(
            self, use_locking=False, name=inner.name(opt)
        )
        # The names under which MixedPrecisionLossScaleOptimizer saved them.
        for name, child in (("base_optimizer", opt), ("loss_scale", self._loss_scale)):
            if isinstance(child, tf.__internal__.tracking.Trackable):
                self._track_trackable(child, name)

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer inside."""
        return self._optimizer

    @property
    def iterations(self) -> Any:
        """The step counter of a Keras optimizer; TensorFlow 1's have none."""
        return self._optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self._optimizer.iterations = value

    @property
    def learning_rate(self) -> Any:
        """The learning rate of a Keras optimizer; TensorFlow 1's keep theirs."""
        return self._optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if not inner.is_keras(self._optimizer):
            message = (
                f"The learning rate of {inner.name(self._optimizer)} cannot be set: "
                "optimizers of TensorFlow 1 take a tensor or variable for it when "
                "they are made."
            )
            raise AttributeError(message)
        self._optimizer.learning_rate = value

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return a loss, a tensor or a callable, times the scale, in float32.

        With `get_unscaled_gradients` and `apply_gradients` it makes a training loop
        around a tape of one's own, as in tf.keras.
        """
        return self._scaled(loss, self._current())

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Return gradients of a scaled loss divided by the scale; float16 widened."""
        return self._binding.unscale(list(grads), self._current())

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        *arguments: Any,
        tape: Any = None,
        **keywords: Any,
    ) -> list[tuple[Any, Any]]:
        """Return unscaled gradients, in the dtype of their variables, with these.

        Args:
            loss: The loss, or a callable that returns it. Eagerly a callable, unless
                there is a tape.
            var_list: The variables.
            *arguments: Anything else that an optimizer of TensorFlow 1 takes.
            tape: The `tf.GradientTape` that recorded a loss given as a tensor.
            **keywords: Anything else that an optimizer of TensorFlow 1 takes.
        """
        if keywords.get("grad_loss") is not None:
            # As wide as the scaled loss.
            given = leaves.checked("grad_loss", "", keywords["grad_loss"])
            keywords["grad_loss"] = leaves.widened(given)
        if tape is None and not inner.is_keras(self._optimizer):
            pairs = super().compute_gradients(loss, var_list, *arguments, **keywords)
        else:
            pairs = self._gradients_by_tape(
                loss, var_list, tape, *arguments, **keywords
            )
        return [(_cast(_check(grad, var), var), var) for grad, var in pairs]

    def _gradients_by_tape(
        self,
        loss: Any,
        var_list: Any,
        tape: Any,
        *arguments: Any,
        grad_loss: Any = None,
        **keywords: Any,
    ) -> list[tuple[Any, Any]]:
        """Compute gradients for an optimizer that has no method for it."""
        if tape is None and not callable(loss):
            message = (
                "loss must be a callable, or come with the tape that recorded it: "
                "minimize(loss, var_list=variables, tape=tape)."
            )
            raise SettingError(message)
        if arguments or keywords:
            message = (
                f"{[*arguments, *keywords]} are arguments for optimizers of TensorFlow "
                "1. With a Keras optimizer, or a tape, there are loss, var_list, tape "
                "and grad_loss."
            )
            raise SettingTypeError(message)
        scale = self._current()

        def scaled_loss() -> Any:
            value = loss() if callable(loss) else loss
            return self._binding.scale_loss(value, scale)

        pairs = inner.gradients(scaled_loss, var_list, tape, grad_loss)
        unscaled = self._binding.unscale([gradient for gradient, _ in pairs], scale)
        variables = [variable for _, variable in pairs]
        return list(zip(unscaled, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """Apply unscaled gradients if they are finite, then update the loss scale.

        On a skipped step the wrapped optimizer is not called at all: weights, slots
        and step counters stay as they are. If it raises, the scale does not move;
        what it had written by then stays. A step is also skipped for a finite gradient
        that is too large for the optimizer's state; the scale and its counters then
        stay, because no lower scale would help. Under a strategy this is called in
        replica context, inside `strategy.run`.

        Args:
            grads_and_vars: Pairs of gradient and variable; an iterator will do.
                Pairs whose gradient is `None` are left out.
            *arguments: Anything else that the wrapped optimizer takes, such as
                `global_step`.
            **keywords: The same, by name.

        Returns:
            `None` eagerly, an op in a graph.

        Raises:
            ContextError: If called in cross-replica context (a ValueError).
            GradientError: If a gradient is not floating-point (a TypeError).
            StructureError: If no variable has a gradient, or a gradient has another
                shape than its variable (a ValueError).
        """
        replicas.check_replica_context("apply_gradients")
        pairs = [(_check(grad, var), var) for grad, var in grads_and_vars]
        variables = [variable for _, variable in pairs]
        if all(gradient is None for gradient, _ in pairs):
            names = [getattr(variable, "name", variable) for variable in variables]
            message = (
                f"There is no gradient for any of the variables {names}. Check that "
                "the loss depends on them, and that it was computed inside the tape."
            )
            raise StructureError(message)
        inner.build(self._optimizer, variables)
        return super().apply_gradients(pairs, *arguments, **keywords)

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
            global_step: Handed to the wrapped optimizer's `apply_gradients`. The
                variables may stand here too, as in Keras's method.
            var_list: As for `compute_gradients`.
            name: Handed to the wrapped optimizer's `apply_gradients`.
            **keywords: As for `compute_gradients`.
        """
        is_step = isinstance(global_step, tf.Variable)
        if var_list is None and global_step is not None and not is_step:
            global_step, var_list = None, global_step
        return super().minimize(loss, global_step, var_list, name=name, **keywords)

    def variables(self) -> list[Any]:
        """Return the variables of the wrapped optimizer and of the loss scale."""
        return inner.variables(self._optimizer) + inner.variables(self._loss_scale)

    def get_slot(self, var: Any, name: str) -> Any:
        """Return a slot variable of the wrapped optimizer."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the wrapped optimizer's slots."""
        return list(self._optimizer.get_slot_names())

    def __dir__(self) -> list[str]:
        """List the attributes, except for `get_slot_names`.

        Checkpoints ask for it by `dir`. The slots belong to the wrapped optimizer and
        are saved with it; offered twice, they cannot be saved at all.
        """
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _trackable_children(
        self, save_type: str = "checkpoint", **keywords: Any
    ) -> dict[str, Any]:
        """Return what is saved with this optimizer.

        TensorFlow cannot load a SavedModel with the slots of an optimizer of
        TensorFlow 1. There they go as plain variables, which a step can use as well.
        """
        children: dict[str, Any] = super()._trackable_children(save_type, **keywords)
        if save_type == "savedmodel" and not inner.is_keras(self._optimizer):
            children.pop("base_optimizer", None)
            for index, variable in enumerate(inner.variables(self._optimizer)):
                children[f"optimizer_variable_{index}"] = variable
        return children

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would be set in vain: settings of the wrapped optimizer."""
        wrapped = self.__dict__.get("_optimizer")
        own = name.startswith("_") or hasattr(type(self), name)
        if not own and hasattr(wrapped, name):
            message = (
                f"{name} belongs to the optimizer inside; set it there: "
                f"optimizer.inner_optimizer.{name} = ..."
            )
            raise AttributeError(message)
        super().__setattr__(name, value)

    def _check_optimizer(self, opt: Any) -> None:
        inner.check(opt)

    def _can_be_applied(self, gradients: list[Any], variables: list[Any]) -> Array:
        """Return whether the gradients are finite, and stay so when applied.

        Replicas and micro-batches are added up; moments and norms are squares.
        """
        replica_count = tf.distribute.get_strategy().num_replicas_in_sync
        addends = replica_count * headroom.accumulation_steps(self._optimizer)

        def is_within(gradient: Any, dtype: str, elements: int) -> Array:
            largest = headroom.largest_gradient(
                self._optimizer, dtype, dtype, elements=elements, addends=addends
            )
            return leaves.is_within(gradient, largest, dtype, addends)

        def are_within(gradients: list[Any], variables: list[Any]) -> Array:
            elements = sum(map(_size, variables))
            return verbs.all_true(
                is_within(gradient, _dtype_of(variable, gradient), elements)
                for gradient, variable in zip(gradients, variables, strict=True)
            )

        return replicas.in_all(are_within, gradients, variables)

    def _are_finite(self, gradients: list[Any]) -> Array:
        def are_finite(own: list[Any]) -> Array:
            return verbs.all_true(map(leaves.has_finite_values, own))

        return replicas.in_all(are_finite, gradients)

    def _prepare(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return gradients in the dtypes of their variables."""
        return [(_cast(gradient, variable), variable) for gradient, variable in pairs]

    def _skip(self, global_step: Any = None, *_: Any, **__: Any) -> Any:
        if not self._count_skipped_steps:
            return None
        if inner.is_keras(self._optimizer):
            return inner.advance(self._optimizer.iterations)
        return None if global_step is None else inner.advance(global_step)


class MixedPrecisionLossScaleOptimizer(LossScaleOptimizer):
    """`LossScaleOptimizer` under its name in `tf.compat.v1.mixed_precision`.

    Example:
        >>> import tensorflow as tf, lossscale.tensorflow as ls
        >>> descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        >>> ls.MixedPrecisionLossScaleOptimizer(descent, loss_scale=128).loss_scale
        FixedLossScale(128.0)
    """

    def __init__(
        self,
        opt: Any,
        loss_scale: classic.LossScale | float | str,
        **options: Any,
    ) -> None:
        """Wrap an optimizer of `tf.compat.v1.train`.

        Args:
            opt: The optimizer to wrap.
            loss_scale: A LossScale, a number, or "dynamic".
            **options: The keywords of `LossScaleOptimizer`.

        Raises:
            SettingError: If either argument is of another kind (a ValueError).
        """
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            message = (
                "opt must be a tf.compat.v1.train.Optimizer, got "
                f"{type(opt).__name__}. LossScaleOptimizer wraps Keras's too."
            )
            raise SettingError(message)
        super().__init__(opt, loss_scale, **options)


@unconverted
def _check(gradient: Any, variable: Any) -> Any:
    """Return a gradient as a tensor, or raise if it is none of its variable."""
    if gradient is None:
        return None
    name = getattr(variable, "name", "")
    checked = leaves.checked("gradient", name, gradient)
    if getattr(variable, "dtype", None) is None:
        return checked
    shape, wanted = leaves.values(checked).shape, tf.TensorShape(variable.shape)
    if isinstance(checked, tf.IndexedSlices):
        shape, wanted = shape[1:], wanted[1:]
    if not shape.is_compatible_with(wanted):
        message = (
            f"The gradient of {name} has the shape {shape}, and its variable {wanted}."
        )
        raise StructureError(message)
    return checked


def _cast(gradient: Any, variable: Any) -> Any:
    """Return a gradient in the dtype of its variable.

    Gradients are unscaled in float32; a float16 variable takes float16 ones.
    """
    if gradient is None:
        return None
    return leaves.cast(gradient, tf.as_dtype(_dtype_of(variable, gradient)))


def _dtype_of(variable: Any, gradient: Any) -> str:
    """Return the name of a variable's dtype; its gradient's where it has none."""
    dtype = getattr(variable, "dtype", None) or leaves.values(gradient).dtype
    return str(tf.as_dtype(dtype).base_dtype.name)


def _size(variable: Any) -> int:
    """Return how many numbers a variable holds; 1 where that is not known."""
    shape = tf.TensorShape(getattr(variable, "shape", ()))
    return shape.num_elements() or 1
