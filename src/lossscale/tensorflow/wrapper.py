# SPDX-License-Identifier: Apache-2.0
"""What every optimizer wrapper on TensorFlow does, whatever class tf_keras expects.

Scale the loss, unscale the gradients, skip a step that overflowed. `optimizer.py` and
`tf_keras.py` have the public classes.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from lossscale.core import classic, headroom
from lossscale.core.state import Array
from lossscale.errors import SettingError, SettingTypeError, StructureError
from lossscale.tensorflow import graph_names, inner, leaves, replicas, verbs
from lossscale.tensorflow.autograph import unconverted
from lossscale.tensorflow.binding import BINDING
from lossscale.tensorflow.classic import DynamicLossScale, FixedLossScale


class Wrapper(classic.LossScaleOptimizer):
    """Wraps an optimizer of `tf.compat.v1.train`, of Keras 3 or of tf_keras."""

    _binding = BINDING
    _fixed_class = FixedLossScale
    _dynamic_class = DynamicLossScale
    _optimizer: Any
    _count_skipped_steps = False
    # tf_keras's wrapper has the same two, and sets them in its constructor.
    _loss_has_been_scaled = False
    _gradients_have_been_unscaled = False

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer inside."""
        return self._optimizer

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return a loss, a tensor or a callable, times the scale, in float32.

        With `get_unscaled_gradients` and `apply_gradients` it makes a training loop
        around a tape of one's own, as in tf.keras.
        """
        self._loss_has_been_scaled = True
        return self._scaled(loss, self._current())

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Return gradients of a scaled loss divided by the scale; float16 widened."""
        self._gradients_have_been_unscaled = True
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
        self._loss_has_been_scaled = self._gradients_have_been_unscaled = True
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
        return [(_cast(grad, var), var) for grad, var in pairs]

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
            SettingError: If the optimizer divides by an epsilon that is 0 in the dtype
                of a float16 variable (a ValueError).
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
        self._check_calls(*arguments, **keywords)
        dtypes = {_dtype_of(var, grad) for grad, var in pairs if grad is not None}
        headroom.check_epsilon(self._optimizer, dtypes)
        inner.build(self._optimizer, variables)
        pairs, keywords = inner.aggregate(self._optimizer, pairs, keywords)
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

    def _check_optimizer(self, opt: Any) -> None:
        inner.check(opt)

    def _step(
        self,
        gradients: list[Any],
        variables: list[Any],
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        graph_names.create_slots(self._optimizer, variables, self._loss_scale)
        return super()._step(gradients, variables, *arguments, **keywords)

    def _check_calls(self, global_step: Any = None, **_: Any) -> None:
        """Raise or warn if gradients arrive that have not been scaled and unscaled."""
        scaled, unscaled = (
            self._loss_has_been_scaled,
            self._gradients_have_been_unscaled,
        )
        if not scaled and inner.is_step_of_tf_keras(global_step):
            message = (
                "tf_keras's compile() was given an optimizer of tf.compat.v1.train, of "
                "which it does not scale the loss. Wrap an optimizer of "
                "tf_keras.optimizers, such as "
                "LossScaleOptimizer(tf_keras.optimizers.Adam(), 'dynamic')."
            )
            raise SettingError(message)
        if scaled != unscaled:
            forgotten = "get_unscaled_gradients" if scaled else "get_scaled_loss"
            called = "get_scaled_loss" if scaled else "get_unscaled_gradients"
            message = (
                f"apply_gradients() was called after {called}() and without "
                f"{forgotten}(): the gradients that are applied are wrong by a factor "
                f"of the loss scale. Call {forgotten}() too."
            )
            warnings.warn(message, stacklevel=4)

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
