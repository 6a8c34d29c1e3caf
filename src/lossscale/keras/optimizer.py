# SPDX-License-Identifier: Apache-2.0
"""Keras's LossScaleOptimizer with policies, bounds and a report of its steps.

A step, on every backend:

    unscale     divide the gradients by the scale
    check       are the unscaled gradients finite, on every replica, and small enough?
    update      if so, let the inner optimizer apply them: the only branch; if not,
                find the reasons
    advance     take the policy's step; assign the scale, the counters and the rest of
                the report

The rule is not restated here: the policy's step runs on `keras.ops`. Keras's class is
the base because `compile()`, `SwapEMAWeights` and `MultiOptimizer` require it. Its
methods for gradients and the scale are replaced; `iterations`, `learning_rate`,
`variables` and `finalize_variable_values` remain its own.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, Literal

import keras
from keras import ops

from lossscale.core.policies import Policy, advance, wanted_measurements
from lossscale.core.state import Array, Signal
from lossscale.errors import StructureError
from lossscale.keras import arguments, checkpoint, consensus, gradients
from lossscale.keras.backend import branch, dtype_name, limit, read, where
from lossscale.keras.headroom import Headroom
from lossscale.keras.loss import multiply_loss, require_current
from lossscale.keras.report import StepReport
from lossscale.keras.stateless import StatelessStep, check_backend, check_count
from lossscale.keras.training_loop import TrainingLoop


@keras.saving.register_keras_serializable(package="lossscale")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras's `LossScaleOptimizer`, whose gradients cannot make weights NaN.

    Use it as Keras's, in `compile()` and in loops of your own. Without `policy` it has
    Keras's numbers, with a floor and a cap for the scale. `apply` and `stateless_apply`
    take scaled gradients, as Keras's do.

    Example:
        >>> import keras, lossscale
        >>> from lossscale.keras import LossScaleOptimizer
        >>> policy = lossscale.Dynamic(init_scale=2.0**16, hysteresis=2)
        >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=policy)
        >>> optimizer.build([keras.Variable([1.0])])
        >>> float(optimizer.scale_loss(2.0))
        131072.0
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float | Literal["auto"] = arguments.INITIAL_SCALE,
        dynamic_growth_steps: int = arguments.GROWTH_STEPS,
        name: str | None = None,
        *,
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> None:
        """Wrap an optimizer.

        Args:
            inner_optimizer: The optimizer of Keras that applies the gradients.
            initial_scale: The scale to start with, if no policy is given; or "auto" for
                the policy `AutoStart`, which finds it on the first batch.
            dynamic_growth_steps: How many finite steps in a row double the scale, if
                no policy is given.
            name: The name of the optimizer.
            policy: How the scale moves: `lossscale.Dynamic`, `lossscale.Fixed`, a
                preset, or a policy of your own.
            **kwargs: Keywords of older configs; anything else is an error.

        Raises:
            SettingError: If a number is out of range, or if the policy is given
                together with Keras's numbers.
            SettingTypeError: If the optimizer or the policy is not one.
        """
        arguments.check_keywords(kwargs)
        arguments.check_inner(inner_optimizer)
        chosen = arguments.make_policy(policy, initial_scale, dynamic_growth_steps)
        interval = getattr(chosen, "growth_interval", dynamic_growth_steps)
        scale = float(chosen.init().scale)
        # By name: before Keras 3.12 it is one of the keywords.
        super().__init__(inner_optimizer, scale, interval, name=name)
        self.policy = chosen
        self._policy_was_given = policy is not None or initial_scale == "auto"
        self._measures_amax = "amax" in wanted_measurements(chosen)
        self._loop = TrainingLoop()
        self._elements = 0

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the variables: Keras's two, by its names and dtypes, and five more.

        A policy that remembers more, such as `Headroom`, has a variable for each number
        that it remembers, after these.

        Raises:
            SettingError: If the inner optimizer divides by an epsilon that is 0 in the
                dtype of a float16 variable.
        """
        if self.built:
            return
        self._read_headroom().check_epsilon(map(dtype_name, var_list))
        first = self.policy.init()
        self.step_counter = self._number("step_counter", "int", first.good_steps)
        self.dynamic_scale = self._number("dynamic_scale", "float32", first.scale)
        # Ours come last, so that a file of Keras's class can be recognised.
        self.bad_steps = self._number("bad_steps", "int", first.bad_steps)
        self.last_scale = self._number("last_scale", "float32", first.scale)
        self.skipped_steps = self._number("skipped_steps", "int", 0)
        self.consecutive_skips = self._number("consecutive_skips", "int", 0)
        self.skip_reasons = self._number("skip_reasons", "int32", 0, (len(var_list),))
        self._memory = [
            self._number(name, "float32", getattr(first, name))
            for name in first._fields[_KEPT:]
        ]
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        self._elements = sum(math.prod(variable.shape) for variable in var_list)
        # Past Keras's own build, which would create its two variables again.
        super(keras.optimizers.LossScaleOptimizer, self).build(list(var_list))

    def _number(
        self, name: str, dtype: str, value: float, shape: tuple[int, ...] = ()
    ) -> Any:
        """Create a variable of one number, or of several."""
        return self.add_variable(
            shape=shape,
            dtype=dtype,
            initializer=keras.initializers.Constant(value),
            aggregation="none",
            name=name,
        )

    @property
    def last_step(self) -> StepReport:
        """The report of the last step, as values on the device.

        Raises:
            StructureError: If read while `fit` on JAX holds the variables; an access to
                a callback's `self.model` returns them.
        """
        if not self.built:
            first = self.policy.init()
            return StepReport(
                False, first.scale, first.good_steps, first.bad_steps, 0, 0
            )
        if getattr(self.dynamic_scale, "_value", 0) is None:
            # Keras would return the variable's first value.
            message = (
                "last_step was read while fit on JAX holds the variables. In a "
                "callback read self.model.optimizer.last_step: an access to self.model "
                "returns them; or call model.jax_state_sync() before."
            )
            raise StructureError(message)
        consecutive = read(self.consecutive_skips)
        return StepReport(
            skipped=consecutive > 0,
            scale=read(self.last_scale),
            good_steps=read(self.step_counter),
            bad_steps=read(self.bad_steps),
            skipped_steps=read(self.skipped_steps),
            consecutive_skips=consecutive,
            reasons=read(self.skip_reasons),
            names=tuple(map(gradients.name_of, self._trainable_variables)),
        )

    @property
    def state(self) -> Any:
        """The policy's state, as values on the device.

        Together with `policy` this is what `lossscale.to_portable` takes.
        """
        first = self.policy.init()
        if not self.built:
            return first
        return type(first)(*map(read, self._state_variables()))

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale, in float32 (float64 stays float64).

        Args:
            loss: A floating-point tensor, or a Python number.

        Raises:
            GradientError: If the loss is of another type; or if, on JAX, the scale
                would become a constant of the program that `jax.jit` is tracing.
        """
        self._loop.note_scaled_loss()
        return multiply_loss(loss, self._current_scale("scale_loss"))

    def stateless_scale_loss(
        self, optimizer_variables: Sequence[Any], loss: Any
    ) -> Any:
        """Return the loss times the scale that is among the optimizer's variables.

        The companion of `stateless_apply`. Inside `jax.jit`, `scale_loss` would need a
        `keras.StatelessScope` around it.

        Args:
            optimizer_variables: The current values of `optimizer.variables`.
            loss: A floating-point tensor, or a Python number.
        """
        self._check_built("stateless_scale_loss")
        check_count("optimizer_variables", optimizer_variables, self.variables)
        self._loop.note_scaled_loss()
        flags = [variable is self.dynamic_scale for variable in self.variables]
        return multiply_loss(loss, optimizer_variables[flags.index(True)])

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the scaled loss, as tf.keras's optimizer did.

        Args:
            loss: A loss, or a callable that returns one; then the result is a
                callable.
        """
        self._loop.note_classic_scaled_loss()
        if not callable(loss):
            return multiply_loss(loss, self._current_scale("get_scaled_loss"))

        def compute_scaled_loss() -> Any:
            return multiply_loss(loss(), self._current_scale("get_scaled_loss"))

        return compute_scaled_loss

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Return the gradients divided by the scale, as tf.keras's optimizer did.

        From then on `apply` and `apply_gradients` take unscaled gradients, so a loop
        written for tf.keras works unchanged. An infinity comes back as NaN, which
        clipping does not turn into a number: `apply` still skips the step.

        Raises:
            GradientError: If the optimizer was given scaled gradients before.
        """
        self._loop.note_unscaled_gradients()
        scaled = list(grads)
        # As many gradients as variables belong to them: some may be overwritten.
        variables: Sequence[Any] = [None] * len(scaled)
        if self.built and len(scaled) == len(self._trainable_variables):
            variables = self._trainable_variables
        gradients.validate(scaled, variables)
        scale = self._current_scale("get_unscaled_gradients")
        unscaled = gradients.unscale(scaled, variables, scale)
        return gradients.replace_infinities(unscaled)

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> None:
        """Unscale the gradients and apply them, or skip the step; move the scale.

        On torch it waits for the device once, to know whether to skip.

        Args:
            grads: Scaled gradients, one for each variable; None where there is none.
            trainable_variables: The variables, unless the optimizer is built.

        Raises:
            StructureError: If gradients and variables do not match.
            GradientError: If a gradient is not floating-point; or if, on JAX, `jit`
                traces without the optimizer's variables.
        """
        unscaled = list(grads)
        variables = self._find_variables(unscaled, trainable_variables)
        gradients.validate(unscaled, variables)
        is_scaled = self._loop.note_apply()
        if keras.backend.backend() == "jax":
            self._check_variables_are_known(variables)
            indices = [self._get_variable_index(variable) for variable in variables]
            self._make_stateless_step().run_and_assign(
                unscaled, indices, is_scaled=is_scaled
            )
            return
        on_tensorflow = keras.backend.backend() == "tensorflow"
        headroom = self._read_headroom(
            consensus.count_replicas() if on_tensorflow else 1
        )
        if is_scaled:
            scale = read(self.dynamic_scale)
            unscaled = gradients.unscale(unscaled, variables, scale)
        findings = gradients.inspect(
            unscaled,
            variables,
            headroom,
            measure_amax=self._measures_amax and is_scaled,
        )

        def update(unscaled: list[Any]) -> None:
            grads = gradients.cast_for_optimizer(unscaled, variables, headroom)
            self.inner_optimizer.apply(grads, variables)

        if on_tensorflow:
            consensus.apply_or_skip(
                unscaled, findings, update, partial(self._advance, variables)
            )
            return
        applied = ops.all(ops.equal(findings.reasons, 0))
        branch(applied, lambda: update(unscaled), lambda: None)
        # After the update: if that raises, the scale stays as the weights do.
        self._advance(variables, applied, findings)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Return the values of all variables after a step with scaled gradients.

        Args:
            optimizer_variables: The current values of `optimizer.variables`.
            grads: Scaled gradients, one for each variable; None where there is none.
            trainable_variables: The current values of the variables.

        Raises:
            StructureError: If there are too many values of a kind or too few, or if the
                optimizer is not built.
            SettingError: On the TensorFlow backend, whose optimizers are stateful.
        """
        self._check_built("stateless_apply")
        check_backend()
        check_count("optimizer_variables", optimizer_variables, self.variables)
        check_count(
            "trainable_variables", trainable_variables, self._trainable_variables
        )
        self._loop.note_apply(stateless=True)
        return self._make_stateless_step().run(
            list(optimizer_variables), list(grads), list(trainable_variables)
        )

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Replace weights by their moving averages, if the inner optimizer keeps any.

        Before the first step the averages are zeros: if every step was skipped, the
        weights stay.
        """
        # With micro-batches `iterations` is a number computed from a variable, and
        # under a strategy it has one value per replica: the comparison takes all three.
        if bool(ops.greater(self.iterations, 0)):
            super().finalize_variable_values(var_list)

    def check_finite(self, grads: Sequence[Any]) -> Array:
        """Return whether all gradients are finite; None is not counted."""
        unknown = [None] * len(grads)
        return ops.all(ops.equal(gradients.find_reasons(grads, unknown, None), 0))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments as plain values: Keras's four, and a policy if given.

        Raises:
            SettingTypeError: If the policy is of a class that Keras cannot write.
        """
        return checkpoint.make_config(
            self, self.policy if self._policy_was_given else None
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the optimizer of a config: ours, or one of Keras's class.

        The config is left as it is; Keras takes the inner optimizer out of it.
        """
        return cls(**checkpoint.read_config(config, custom_objects))

    @classmethod
    def from_keras(cls, optimizer: Any, *, policy: Policy | None = None) -> Any:
        """Convert a `LossScaleOptimizer`: its inner optimizer, scale and counters.

        For a model that was compiled or loaded with Keras's class. The inner optimizer
        is shared, so the converted optimizer should not be used any more.

        Args:
            optimizer: Keras's `LossScaleOptimizer`, or one of ours.
            policy: How the scale moves from now on; unless given, as before.

        Raises:
            SettingTypeError: If it is another optimizer.
        """
        checkpoint.check_convertible(optimizer)
        if policy is None and getattr(optimizer, "_policy_was_given", False):
            policy = optimizer.policy
        inner, name = optimizer.inner_optimizer, optimizer.name
        if policy is None:
            numbers = (optimizer.initial_scale, optimizer.dynamic_growth_steps)
            converted = cls(inner, *numbers, name=name)
        else:
            converted = cls(inner, name=name, policy=policy)
        if optimizer.built:
            converted.build(optimizer._trainable_variables)  # noqa: SLF001  # a base's
            checkpoint.copy_variables(optimizer, converted, converted._name_memory())
            converted._reset_invalid_state()  # our own
        return converted

    def load_own_variables(self, store: Any) -> None:
        """Read the variables from a file that this class wrote, or Keras's.

        A scale that the policy could not use, such as the 0 or the infinity that
        Keras's class can end with, is replaced by the policy's first, with a warning.
        """
        if not (
            self.built
            and checkpoint.load_from_others(
                self, self._variables, self._name_memory(), store
            )
        ):
            # Keras checks the count; it warns, and reads nothing, if that is wrong.
            super().load_own_variables(store)
        if self.built:
            self._reset_invalid_state()

    def _reset_invalid_state(self) -> None:
        checkpoint.reset_invalid_state(self.policy, self._state_variables())

    def _name_memory(self) -> dict[str, Any]:
        """Return the variables of what the policy remembers, by name."""
        return {variable.name: variable for variable in self._memory}

    def _state_variables(self) -> tuple[Any, ...]:
        """Return the variables of the scale, its two counters, and further numbers."""
        return self.dynamic_scale, self.step_counter, self.bad_steps, *self._memory

    def _current_scale(self, method: str) -> Array:
        """Return the current scale, never a constant of a traced program."""
        scale = self.dynamic_scale.value if self.built else self.initial_scale
        return require_current(method, scale)

    def _check_built(self, method: str) -> None:
        """Raise unless the variables exist."""
        if not self.built:
            message = (
                f"To call `{method}`, {type(self).__name__} must be built (i.e. its "
                "variables must have been created). You can build it via "
                "`optimizer.build(trainable_variables)`."
            )
            raise StructureError(message)

    def _read_headroom(self, replica_count: int = 1) -> Headroom:
        """Return how large gradients may be for the inner optimizer."""
        return Headroom(self.inner_optimizer, self._elements, replica_count)

    def _make_stateless_step(self) -> StatelessStep:
        return StatelessStep(
            self._variables,
            self._trainable_variables,
            self.inner_optimizer,
            self.dynamic_scale,
            self._read_headroom(),
            self._advance,
            self._measures_amax,
        )

    def _find_variables(
        self, grads: Sequence[Any], variables: Sequence[Any] | None
    ) -> Sequence[Any]:
        """Return the variables that gradients belong to; build on the first call."""
        if not self.built:
            if variables is None:
                message = (
                    "apply was given gradients without variables, and the optimizer is "
                    "not built. Call optimizer.build(trainable_variables) first, or "
                    "optimizer.apply(grads, trainable_variables)."
                )
                raise StructureError(message)
            variables = list(variables)
            self.build(variables)
        if not grads:  # as in Keras, a step without gradients is a finite one
            return []
        return self._trainable_variables if variables is None else list(variables)

    def _advance(
        self, variables: Sequence[Any], applied: Array, findings: gradients.Findings
    ) -> None:
        """Take the policy's step; assign its state, the counters and the reasons.

        Args:
            variables: The variables of the gradients.
            applied: Whether the update was made.
            findings: If it was not, why; and the largest magnitude, if it is needed.
        """
        reasons = findings.reasons
        state = self.state
        overflow = gradients.is_overflow(reasons)
        too_large = ops.logical_not(ops.logical_or(applied, overflow))
        signal = Signal(applied, too_large=too_large)
        if findings.amax is not None:
            # Of the scaled gradients; unscaling a power of two is exact.
            signal = signal._replace(amax=limit(findings.amax * state.scale))
        self.skip_reasons.assign(self._reasons_of_all(reasons, variables))
        new_state = advance(self.policy, state, signal, where=where)
        total, consecutive = read(self.skipped_steps), read(self.consecutive_skips)
        self.last_scale.assign(state.scale)
        self.skipped_steps.assign(where(applied, total, total + 1))
        self.consecutive_skips.assign(where(applied, 0, consecutive + 1))
        for variable, value in zip(self._state_variables(), new_state, strict=True):
            variable.assign(value)

    def _reasons_of_all(self, reasons: Array, variables: Sequence[Any]) -> Array:
        """Return the reasons of some variables as reasons of all trainable ones."""
        trainable = self._trainable_variables
        if len(variables) == len(trainable) and all(map(is_, variables, trainable)):
            return reasons
        numbers: list[Array] = [ops.zeros((), "int32")] * len(trainable)
        for index, variable in enumerate(variables):
            numbers[self._get_variable_index(variable)] = reasons[index]
        return ops.stack(numbers)


_KEPT = 3
"""The numbers that every state has: the scale and its two counters."""
