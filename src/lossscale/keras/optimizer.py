# SPDX-License-Identifier: Apache-2.0
"""Keras's LossScaleOptimizer with policies, bounds and a record of its steps.

A step, on every backend:

    unscale     divide the gradients by the scale
    check       are the unscaled gradients finite, on every replica, and small enough?
    update      if so, let the inner optimizer apply them: the only branch; if not,
                find out why
    advance     take the policy's step; assign the scale, the counters and the rest of
                the report

The rule is not restated here: the policy's step runs on `keras.ops`. Keras's class is
the base because `compile()`, `SwapEMAWeights` and `MultiOptimizer` ask for it. What it
does with gradients and the scale is replaced; `iterations`, `learning_rate`,
`variables` and `finalize_variable_values` remain its own. `losses.py`, `stateless.py`
and `files.py` have the rest.
"""

import math
from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any

import keras
from keras import ops

from lossscale.core.policies import Policy, advance
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.errors import StructureError
from lossscale.keras import gradients, replicas, settings
from lossscale.keras.facts import LastStep
from lossscale.keras.files import Files
from lossscale.keras.headroom import Headroom
from lossscale.keras.loops import Loop
from lossscale.keras.operations import branch, dtype_of, read, where
from lossscale.keras.stateless import Stateless


@keras.saving.register_keras_serializable(package="lossscale")
class LossScaleOptimizer(Stateless, Files, keras.optimizers.LossScaleOptimizer):
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
        initial_scale: float = settings.INITIAL_SCALE,
        dynamic_growth_steps: int = settings.GROWTH_STEPS,
        name: str | None = None,
        *,
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> None:
        """Wrap an optimizer.

        Args:
            inner_optimizer: The optimizer of Keras that applies the gradients.
            initial_scale: The scale to start with, if no policy is given.
            dynamic_growth_steps: How many clean steps in a row double the scale, if no
                policy is given.
            name: What the optimizer is called.
            policy: How the scale moves: `lossscale.Dynamic`, `lossscale.Fixed`, a
                preset, or a policy of your own.
            **kwargs: What configs of older versions carry; anything else is an error.

        Raises:
            SettingError: If a number is out of range, or if the policy is given
                together with Keras's numbers.
            SettingTypeError: If the optimizer or the policy is not one.
        """
        settings.check_keywords(kwargs)
        settings.check_inner(inner_optimizer)
        chosen = settings.make_policy(policy, initial_scale, dynamic_growth_steps)
        interval = getattr(chosen, "growth_interval", dynamic_growth_steps)
        scale = float(chosen.init().scale)
        # By name: before Keras 3.12 it is one of the keywords.
        super().__init__(inner_optimizer, scale, interval, name=name)
        self.policy = chosen
        self._policy_was_given = policy is not None
        self._loop = Loop()
        self._elements = 0

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the variables: Keras's two, by its names and dtypes, and five more.

        Raises:
            SettingError: If the inner optimizer divides by an epsilon that is 0 in the
                dtype of a float16 variable.
        """
        if self.built:
            return
        self._headroom().check_epsilon(map(dtype_of, var_list))
        first = self.policy.init()
        self.step_counter = self._number("step_counter", "int", first.good_steps)
        self.dynamic_scale = self._number("dynamic_scale", "float32", first.scale)
        # Ours come last: so a file of Keras's class can be told from one of ours.
        self.bad_steps = self._number("bad_steps", "int", first.bad_steps)
        self.last_scale = self._number("last_scale", "float32", first.scale)
        self.skipped_steps = self._number("skipped_steps", "int", 0)
        self.consecutive_skips = self._number("consecutive_skips", "int", 0)
        self.skip_reasons = self._number("skip_reasons", "int32", 0, (len(var_list),))
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
    def last_step(self) -> LastStep:
        """What the last step did, as values on the device.

        Raises:
            StructureError: If read while `fit` on JAX holds the variables; a callback's
                `self.model` hands them back.
        """
        if not self.built:
            first = self.policy.init()
            return LastStep(False, first.scale, first.good_steps, first.bad_steps, 0, 0)
        if getattr(self.dynamic_scale, "_value", 0) is None:
            # Keras would return the variable's first value.
            message = (
                "last_step was read while fit on JAX holds the variables. In a "
                "callback read self.model.optimizer.last_step: self.model hands them "
                "back; or call model.jax_state_sync() before."
            )
            raise StructureError(message)
        consecutive = read(self.consecutive_skips)
        return LastStep(
            skipped=consecutive > 0,
            scale=read(self.last_scale),
            good_steps=read(self.step_counter),
            bad_steps=read(self.bad_steps),
            skipped_steps=read(self.skipped_steps),
            consecutive_skips=consecutive,
            reasons=read(self.skip_reasons),
            names=tuple(map(gradients.name_of, self._trainable_variables)),
        )

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
        given = list(grads)
        variables = self._variables_of(given, trainable_variables)
        gradients.check(given, variables)
        scaled = self._loop.takes_scaled()
        if keras.backend.backend() == "jax":
            self._apply_on_jax(given, variables, scaled=scaled)
            return
        on_tensorflow = keras.backend.backend() == "tensorflow"
        headroom = self._headroom(replicas.count() if on_tensorflow else 1)
        if scaled:
            given = gradients.unscaled(given, variables, read(self.dynamic_scale))
        reasons = gradients.reasons(given, variables, headroom)

        def update(unscaled: list[Any]) -> None:
            fitted = gradients.fitted(unscaled, variables, headroom)
            self.inner_optimizer.apply(fitted, variables)

        if on_tensorflow:
            replicas.step(given, reasons, update, partial(self._advance, variables))
            return
        applied = ops.all(ops.equal(reasons, 0))
        branch(applied, lambda: update(given), lambda: None)
        # After the update: if that raises, the scale stays as the weights do.
        self._advance(variables, applied, reasons)

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
        """Return whether every gradient that there is is finite."""
        unknown = [None] * len(grads)
        return ops.all(ops.equal(gradients.reasons(grads, unknown, None), 0))

    def _headroom(self, replica_count: int = 1) -> Headroom:
        """Return what the inner optimizer can hold."""
        return Headroom(self.inner_optimizer, self._elements, replica_count)

    def _variables_of(
        self, given: Sequence[Any], variables: Sequence[Any] | None
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
        if not given:  # as in Keras, a step without gradients is a clean one
            return []
        return self._trainable_variables if variables is None else list(variables)

    def _advance(
        self, variables: Sequence[Any], applied: Array, reasons: Array
    ) -> None:
        """Take the policy's step; assign the scale, the counters and the reasons.

        Args:
            variables: What gradients were given for.
            applied: Whether the update was made.
            reasons: If it was not, why, a number for each of the variables.
        """
        places = (self.dynamic_scale, self.step_counter, self.bad_steps)
        state = ScaleState(*(read(place) for place in places))
        overflow = gradients.is_overflow(reasons)
        too_large = ops.logical_not(ops.logical_or(applied, overflow))
        signal = Signal(applied, too_large=too_large)
        self.skip_reasons.assign(self._in_place(reasons, variables))
        moved = advance(self.policy, state, signal, where=where)
        total, consecutive = read(self.skipped_steps), read(self.consecutive_skips)
        self.last_scale.assign(state.scale)
        self.skipped_steps.assign(where(applied, total, total + 1))
        self.consecutive_skips.assign(where(applied, 0, consecutive + 1))
        for place, value in zip(places, moved, strict=True):
            place.assign(value)

    def _in_place(self, reasons: Array, variables: Sequence[Any]) -> Array:
        """Return the reasons of some variables among those of all."""
        known = self._trainable_variables
        if len(variables) == len(known) and all(map(is_, variables, known)):
            return reasons
        numbers: list[Array] = [ops.zeros((), "int32")] * len(known)
        for place, variable in enumerate(variables):
            numbers[self._get_variable_index(variable)] = reasons[place]
        return ops.stack(numbers)
