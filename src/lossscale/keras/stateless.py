# SPDX-License-Identifier: Apache-2.0
"""Stateless apply: values in, values out; required on JAX, available on torch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from lossscale.core.state import Array
from lossscale.errors import GradientError, SettingError, StructureError
from lossscale.keras import gradients
from lossscale.keras.backend import branch, read
from lossscale.keras.headroom import Headroom
from lossscale.keras.tracing import would_become_constant


class StatelessStep(NamedTuple):
    """A step on values, with the parts of the optimizer that it needs."""

    own_variables: Sequence[Any]
    """The variables of the wrapper; those of the inner optimizer follow them."""
    trainable_variables: Sequence[Any]
    inner_optimizer: Any
    dynamic_scale: Any
    """The variable among the wrapper's that holds the scale."""
    headroom: Headroom
    advance: Callable[[Sequence[Any], Array, gradients.Findings], None]
    """Assigns the scale and the counters, given variables, `applied` and findings."""
    measure_amax: bool
    """Whether the policy reads the largest magnitude."""

    def run(
        self,
        optimizer_values: list[Any],
        scaled_grads: list[Any],
        trainable_values: list[Any],
        *,
        is_scaled: bool = True,
    ) -> tuple[list[Any], list[Any]]:
        """Return the values of all variables after a step.

        Args:
            optimizer_values: The current values of the optimizer's variables.
            scaled_grads: Gradients, one for each variable; None where there is none.
            trainable_values: The current values of the trainable variables.
            is_scaled: Whether the gradients are still scaled.
        """
        variables = self.trainable_variables if scaled_grads else []
        gradients.validate(scaled_grads, variables)
        count = len(self.own_variables)
        weights = _as_tensors(trainable_values, self.trainable_variables)
        inner_values = _as_tensors(
            optimizer_values[count:], self.inner_optimizer.variables
        )
        mapping = list(zip(self.own_variables, optimizer_values[:count], strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            scale = read(self.dynamic_scale)

            def unscale() -> list[Any]:
                if not is_scaled:
                    return scaled_grads
                return gradients.unscale(scaled_grads, variables, scale)

            def update() -> tuple[list[Any], list[Any]]:
                # Divided again, not taken from outside: XLA then fuses one division
                # into the check and one into the update, and unscaled gradients are
                # never written to memory.
                grads = gradients.cast_for_optimizer(
                    unscale(), variables, self.headroom
                )
                results: tuple[list[Any], list[Any]] = (
                    self.inner_optimizer.stateless_apply(inner_values, grads, weights)
                )
                return results

            findings = gradients.inspect(
                unscale(),
                variables,
                self.headroom,
                measure_amax=self.measure_amax and is_scaled,
            )
            applied = ops.all(ops.equal(findings.reasons, 0))
            new_weights, new_inner_values = branch(
                applied, update, lambda: (weights, inner_values)
            )
            self.advance(variables, applied, findings)
        own_values = [scope.get_current_value(x) for x in self.own_variables]
        return new_weights, own_values + new_inner_values

    def run_and_assign(
        self, grads: list[Any], indices: list[int], *, is_scaled: bool
    ) -> None:
        """Take a step on the values of the variables, and assign the results.

        For JAX outside `jit`. Keras's class cannot take one there: both sides of a
        branch are traced, and would assign.

        Args:
            grads: Gradients of some variables.
            indices: The position of each of these among the trainable variables.
            is_scaled: Whether the gradients are still scaled.

        Raises:
            GradientError: If `jax.jit` traces.
            StructureError: If a variable occurs twice.
        """
        if would_become_constant(self.dynamic_scale.value):
            message = (
                "apply was called while jax.jit traces: variables cannot be assigned "
                "there. Use optimizer.stateless_apply(optimizer_variables, grads, "
                "trainable_variables), which returns their new values."
            )
            raise GradientError(message)
        if len(set(indices)) < len(indices):
            message = (
                "apply was given a variable twice. Add its gradients up, and pass it "
                "once."
            )
            raise StructureError(message)
        all_grads: list[Any] = [None] * len(self.trainable_variables) if grads else []
        for index, gradient in zip(indices, grads, strict=True):
            all_grads[index] = gradient
        optimizer_variables = [*self.own_variables, *self.inner_optimizer.variables]
        results = self.run(
            [variable.value for variable in optimizer_variables],
            all_grads,
            [variable.value for variable in self.trainable_variables],
            is_scaled=is_scaled,
        )
        targets = (self.trainable_variables, optimizer_variables)
        for variables, values in zip(targets, results, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)


def check_backend() -> None:
    """Raise on the TensorFlow backend, whose optimizers are stateful."""
    if keras.backend.backend() == "tensorflow":
        message = (
            "stateless_apply is not supported with the TensorFlow backend: Keras's "
            "optimizers have none there. Use optimizer.apply(grads, variables)."
        )
        raise SettingError(message)


def check_count(name: str, values: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raise unless there is one value for each variable."""
    if len(values) != len(variables):
        message = (
            f"{name} must hold one value for each of {len(variables)} variables, got "
            f"{len(values)}. Pass [v.value for v in ...] of the variables, in order."
        )
        raise StructureError(message)


def _as_tensors(values: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Return values in their variables' dtypes: both branches must have the same."""
    return [
        ops.convert_to_tensor(value, variable.dtype)
        for value, variable in zip(values, variables, strict=True)
    ]
