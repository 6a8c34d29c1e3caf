# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step on values: what JAX takes, and torch can."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from lossscale.core.state import Array
from lossscale.errors import GradientError, SettingError, StructureError
from lossscale.keras import gradients
from lossscale.keras.headroom import Headroom
from lossscale.keras.losses import Losses, check_count
from lossscale.keras.operations import branch, read
from lossscale.keras.tracing import would_be_frozen


class Stateless(Losses):
    """A step that returns new values; `LossScaleOptimizer` has the rest."""

    def _headroom(self, replica_count: int = 1) -> Headroom:
        raise NotImplementedError

    def _advance(
        self, variables: Sequence[Any], applied: Array, reasons: Array
    ) -> None:
        raise NotImplementedError

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
        if keras.backend.backend() == "tensorflow":
            message = (
                "stateless_apply is not supported with the TensorFlow backend: Keras's "
                "optimizers have none there. Use optimizer.apply(grads, variables)."
            )
            raise SettingError(message)
        check_count("optimizer_variables", optimizer_variables, self.variables)
        check_count(
            "trainable_variables", trainable_variables, self._trainable_variables
        )
        self._loop.takes_scaled(stateless=True)
        return self._stateless_step(
            list(optimizer_variables), list(grads), list(trainable_variables)
        )

    def _stateless_step(
        self,
        optimizer_variables: list[Any],
        given: list[Any],
        trainable_variables: list[Any],
        *,
        scaled: bool = True,
    ) -> tuple[list[Any], list[Any]]:
        """Take a step on values."""
        variables = self._trainable_variables if given else []
        gradients.check(given, variables)
        own = len(self._variables)
        weights = _as_tensors(trainable_variables, self._trainable_variables)
        inner_values = _as_tensors(
            optimizer_variables[own:], self.inner_optimizer.variables
        )
        mapping = list(zip(self._variables, optimizer_variables[:own], strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            scale = read(self.dynamic_scale)
            headroom = self._headroom()

            def unscale() -> list[Any]:
                if not scaled:
                    return given
                return gradients.unscaled(given, variables, scale)

            def update() -> tuple[list[Any], list[Any]]:
                # Divided again, not taken from outside: XLA then fuses one division
                # into the check and one into the update, and unscaled gradients are
                # never written to memory.
                fitted = gradients.fitted(unscale(), variables, headroom)
                results: tuple[list[Any], list[Any]] = (
                    self.inner_optimizer.stateless_apply(inner_values, fitted, weights)
                )
                return results

            reasons = gradients.reasons(unscale(), variables, headroom)
            applied = ops.all(ops.equal(reasons, 0))
            new_weights, new_inner_values = branch(
                applied, update, lambda: (weights, inner_values)
            )
            self._advance(variables, applied, reasons)
        own_values = [scope.get_current_value(each) for each in self._variables]
        return new_weights, own_values + new_inner_values

    def _apply_on_jax(
        self, given: list[Any], variables: Sequence[Any], *, scaled: bool
    ) -> None:
        """Take a step on the values of the variables, and assign the results.

        Keras's class cannot: both sides of a branch are traced, and would assign.
        """
        if would_be_frozen(self.dynamic_scale.value):
            message = (
                "apply was called while jax.jit traces: variables cannot be assigned "
                "there. Use optimizer.stateless_apply(optimizer_variables, grads, "
                "trainable_variables), which returns their new values."
            )
            raise GradientError(message)
        self._check_variables_are_known(variables)
        ordered = [None] * len(self._trainable_variables) if given else []
        places = [self._get_variable_index(variable) for variable in variables]
        if len(set(places)) < len(places):
            message = (
                "apply was given a variable twice. Add its gradients up, and give it "
                "once."
            )
            raise StructureError(message)
        for place, gradient in zip(places, given, strict=True):
            ordered[place] = gradient
        results = self._stateless_step(
            [each.value for each in self.variables],
            ordered,
            [each.value for each in self._trainable_variables],
            scaled=scaled,
        )
        targets = (self._trainable_variables, self.variables)
        for kind, values in zip(targets, results, strict=True):
            for variable, value in zip(kind, values, strict=True):
                variable.assign(value)


def _as_tensors(values: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Return values in their variables' dtypes; both sides of a branch must agree."""
    return [
        ops.convert_to_tensor(value, variable.dtype)
        for value, variable in zip(values, variables, strict=True)
    ]
