# SPDX-License-Identifier: Apache-2.0
"""The training step of every optimizer wrapper on TensorFlow.

Scale the loss, unscale the gradients, apply them or skip the step. `optimizer.py` and
`tf_keras.py` have the public classes, which differ in the class that tf_keras expects.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from lossscale.core import classic, headroom
from lossscale.core.policies import Policy
from lossscale.core.state import Array
from lossscale.errors import SettingError, SettingTypeError, StructureError
from lossscale.tensorflow import consensus, graph_names, wrapped_optimizer
from lossscale.tensorflow.binding import BINDING
from lossscale.tensorflow.classic import DynamicLossScale, FixedLossScale
from lossscale.tensorflow.functional import all_true
from lossscale.tensorflow.gradient import (
    cast,
    has_finite_values,
    is_within,
    upcast,
    validate_leaf,
    values_of,
)
from lossscale.tensorflow.policy_loss_scale import PolicyLossScale
from lossscale.tensorflow.tracing import skip_autograph


class OptimizerWrapper(classic.LossScaleOptimizer):
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
        self._note_calls("_loss_has_been_scaled")
        return self._scale_loss(loss, self._current())

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Return gradients of a scaled loss divided by the scale, in float32."""
        self._note_calls("_gradients_have_been_unscaled")
        return self._binding.unscale(list(grads), self._current())

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        *arguments: Any,
        tape: Any = None,
        **keywords: Any,
    ) -> list[tuple[Any, Any]]:
        """Return pairs of unscaled gradient and variable, both in the same dtype.

        Args:
            loss: The loss, or a callable that returns it. Eagerly a callable, unless
                there is a tape.
            var_list: The variables.
            *arguments: Anything else that an optimizer of TensorFlow 1 takes.
            tape: The `tf.GradientTape` that recorded a loss given as a tensor.
            **keywords: Anything else that an optimizer of TensorFlow 1 takes.
        """
        self._note_calls("_loss_has_been_scaled", "_gradients_have_been_unscaled")
        if keywords.get("grad_loss") is not None:
            # In the dtype of the scaled loss.
            grad_loss = validate_leaf("grad_loss", "", keywords["grad_loss"])
            keywords["grad_loss"] = upcast(grad_loss)
        scale = self._current()
        if tape is None and not wrapped_optimizer.is_keras(self._optimizer):
            pairs = self._optimizer.compute_gradients(
                self._scale_loss(loss, scale), var_list, *arguments, **keywords
            )
        else:
            _check_tape_arguments(loss, tape, arguments, keywords)
            compute_loss = loss if callable(loss) else lambda: loss
            pairs = wrapped_optimizer.compute_gradients_by_tape(
                self._scale_loss(compute_loss, scale), var_list, tape, **keywords
            )
        gradients, variables = _split(pairs)
        unscaled = self._binding.unscale(gradients, scale)
        return [
            (None if grad is None else cast(grad, _dtype_of(var, grad)), var)
            for grad, var in zip(unscaled, variables, strict=True)
        ]

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
            `None` eagerly, a boolean tensor in a graph.

        Raises:
            ContextError: If called in cross-replica context (a ValueError).
            GradientError: If a gradient is not floating-point (a TypeError).
            SettingError: If the optimizer divides by an epsilon that is 0 in the dtype
                of a float16 variable (a ValueError).
            StructureError: If no variable has a gradient, or a gradient has another
                shape than its variable (a ValueError).
        """
        consensus.check_replica_context("apply_gradients")
        grads_and_vars = [(grad, var) for grad, var in grads_and_vars]
        all_variables = [var for _, var in grads_and_vars]
        pairs = [
            (_validate(grad, var), var)
            for grad, var in grads_and_vars
            if grad is not None
        ]
        if not pairs:
            names = [getattr(variable, "name", variable) for variable in all_variables]
            message = (
                f"There is no gradient for any of the variables {names}. Check that "
                "the loss depends on them, and that it was computed inside the tape."
            )
            raise StructureError(message)
        self._check_calls(*arguments, **keywords)
        headroom.check_epsilon(
            self._optimizer, {_dtype_of(var, grad).name for grad, var in pairs}
        )
        wrapped_optimizer.create_variables(self._optimizer, all_variables)
        pairs, keywords = wrapped_optimizer.aggregate_gradients(
            self._optimizer, pairs, keywords
        )

        def step(gradients: list[Any], variables: list[Any]) -> Any:
            if not tf.executing_eagerly():
                graph_names.create_slots(self._optimizer, variables, self._loss_scale)
            return self._step(gradients, variables, *arguments, **keywords)

        return consensus.call_across_replicas(step, *_split(pairs))

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
            global_step: Passed to the wrapped optimizer's `apply_gradients`. The
                variables may be passed here too, as in Keras's method.
            var_list: As for `compute_gradients`.
            name: Passed to the wrapped optimizer's `apply_gradients`.
            **keywords: As for `compute_gradients`.
        """
        is_step = isinstance(global_step, tf.Variable)
        if var_list is None and global_step is not None and not is_step:
            global_step, var_list = None, global_step
        pairs = self.compute_gradients(loss, var_list, **keywords)
        # Only what was given: Keras's optimizers count no steps in a global_step.
        options = {"global_step": global_step, "name": name}
        return self.apply_gradients(
            pairs, **{key: value for key, value in options.items() if value is not None}
        )

    def _find_scale(self, loss_scale: Any) -> Any:
        """Return the scale that was given, or that a policy means."""
        is_instance = not isinstance(loss_scale, (type, classic.LossScale))
        if is_instance and isinstance(loss_scale, Policy):
            return PolicyLossScale(loss_scale)
        return super()._find_scale(loss_scale)

    def _check_optimizer(self, opt: Any) -> None:
        wrapped_optimizer.check_optimizer(opt)

    def _note_calls(self, *names: str) -> None:
        """Note that the loss was scaled, or that gradients were unscaled."""
        # Past __setattr__, which asks the wrapped optimizer.
        self.__dict__.update(dict.fromkeys(names, True))

    def _check_calls(self, global_step: Any = None, **_: Any) -> None:
        """Raise or warn if gradients arrive that have not been scaled and unscaled."""
        scaled, unscaled = (
            self._loss_has_been_scaled,
            self._gradients_have_been_unscaled,
        )
        if not scaled and wrapped_optimizer.is_step_counter_of_tf_keras(global_step):
            message = (
                "tf_keras's compile() does not scale the loss for an optimizer of "
                "tf.compat.v1.train. Wrap an optimizer of "
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

        def are_within(gradients: list[Any], variables: list[Any]) -> Array:
            elements = sum(map(_count_elements, variables))
            bounds: dict[str, float] = {}
            flags = []
            for gradient, variable in zip(gradients, variables, strict=True):
                dtype = _dtype_of(variable, gradient).name
                if dtype not in bounds:
                    bounds[dtype] = headroom.largest_gradient(
                        self._optimizer,
                        dtype,
                        dtype,
                        elements=elements,
                        addends=addends,
                    )
                flags.append(is_within(gradient, bounds[dtype], dtype, addends))
            return all_true(flags)

        return consensus.all_replicas(are_within, gradients, variables)

    def _are_finite(self, gradients: list[Any]) -> Array:
        def are_finite(gradients: list[Any]) -> Array:
            return all_true(map(has_finite_values, gradients))

        return consensus.all_replicas(are_finite, gradients)

    def _prepare(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return gradients in the dtypes of their variables.

        Gradients are unscaled in float32; a float16 variable takes float16 ones.
        """
        return [(cast(grad, _dtype_of(var, grad)), var) for grad, var in pairs]

    def _skip(self, global_step: Any = None, *_: Any, **__: Any) -> Any:
        if not self._count_skipped_steps:
            return None
        if wrapped_optimizer.is_keras(self._optimizer):
            return wrapped_optimizer.count_step(self._optimizer.iterations)
        return (
            None if global_step is None else wrapped_optimizer.count_step(global_step)
        )


def _split(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the gradients and the variables of pairs."""
    gradients, variables = [], []
    for gradient, variable in pairs:
        gradients.append(gradient)
        variables.append(variable)
    return gradients, variables


def _check_tape_arguments(
    loss: Any, tape: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Raise unless gradients can be computed by a tape."""
    if tape is None and not callable(loss):
        message = (
            "loss must be a callable, or come with the tape that recorded it: "
            "minimize(loss, var_list=variables, tape=tape)."
        )
        raise SettingError(message)
    unknown = [*arguments, *(name for name in keywords if name != "grad_loss")]
    if unknown:
        message = (
            f"{unknown} are arguments for optimizers of TensorFlow 1. With a Keras "
            "optimizer, or a tape, there are loss, var_list, tape and grad_loss."
        )
        raise SettingTypeError(message)


@skip_autograph
def _validate(gradient: Any, variable: Any) -> Any:
    """Return a gradient as a tensor, or raise if it does not fit its variable."""
    name = getattr(variable, "name", "")
    leaf = validate_leaf("gradient", name, gradient)
    if getattr(variable, "dtype", None) is None:
        return leaf
    shape, expected = values_of(leaf).shape, tf.TensorShape(variable.shape)
    if isinstance(leaf, tf.IndexedSlices):
        shape, expected = shape[1:], expected[1:]
    if not shape.is_compatible_with(expected):
        message = (
            f"The gradient of {name} has the shape {shape}, expected {expected}, the "
            "shape of its variable."
        )
        raise StructureError(message)
    return leaf


def _dtype_of(variable: Any, gradient: Any) -> Any:
    """Return a variable's dtype; its gradient's where it has none."""
    dtype = getattr(variable, "dtype", None) or values_of(gradient).dtype
    return tf.as_dtype(dtype).base_dtype


def _count_elements(variable: Any) -> int:
    """Return how many numbers a variable holds; 1 where that is not known."""
    shape = tf.TensorShape(getattr(variable, "shape", ()))
    return shape.num_elements() or 1
