# SPDX-License-Identifier: Apache-2.0
"""The optimizer's side of the loss: scaling it, and tf.keras's two methods."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from lossscale.core.headroom import LARGEST
from lossscale.core.state import Array
from lossscale.errors import GradientError, StructureError
from lossscale.keras import gradients
from lossscale.keras.loops import Loop
from lossscale.keras.operations import dtype_of
from lossscale.keras.tracing import would_be_frozen


class Losses(keras.optimizers.LossScaleOptimizer):
    """What an optimizer does with losses; `LossScaleOptimizer` has the rest."""

    _loop: Loop

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale, in float32 (float64 stays float64).

        Args:
            loss: A floating-point tensor, or a Python number.

        Raises:
            GradientError: If the loss is of another kind; or if, on JAX, the scale
                would become a constant of the program that `jax.jit` is tracing.
        """
        self._loop.loss_was_scaled()
        return _product(loss, self._live_scale("scale_loss"))

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
        self._loop.loss_was_scaled()
        places = [variable is self.dynamic_scale for variable in self.variables]
        return _product(loss, optimizer_variables[places.index(True)])

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the scaled loss, as tf.keras's optimizer did.

        Args:
            loss: A loss, or a callable that returns one; then the result is a callable.
        """
        self._loop.classic_loss_was_scaled()
        if callable(loss):
            return lambda: _product(loss(), self._live_scale("get_scaled_loss"))
        return _product(loss, self._live_scale("get_scaled_loss"))

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Return the gradients divided by the scale, as tf.keras's optimizer did.

        From then on `apply` and `apply_gradients` take unscaled gradients, so the loop
        of tf.keras works as it stands. An infinity comes back as NaN, which clipping
        does not turn into a number: `apply` still skips the step.

        Raises:
            GradientError: If the optimizer was given scaled gradients before.
        """
        self._loop.gradients_were_unscaled()
        given = list(grads)
        # Known to be theirs if there are as many: some may be overwritten by values.
        variables: Sequence[Any] = [None] * len(given)
        if self.built and len(given) == len(self._trainable_variables):
            variables = self._trainable_variables
        gradients.check(given, variables)
        scale = self._live_scale("get_unscaled_gradients")
        return gradients.poisoned(gradients.unscaled(given, variables, scale))

    def _live_scale(self, method: str) -> Array:
        """Return the scale as it is now; never as it was when a program was traced."""
        scale = self.dynamic_scale.value if self.built else self.initial_scale
        if would_be_frozen(scale):
            message = (
                f"{method} was called while jax.jit traces, without the optimizer's "
                "variables: the scale of now would be built into the program. Build "
                "the optimizer and call "
                "optimizer.stateless_scale_loss(optimizer_variables, loss) with the "
                "variables that the traced function was given."
            )
            raise GradientError(message)
        return ops.convert_to_tensor(scale, "float32")

    def _check_built(self, method: str) -> None:
        """Raise unless the variables exist."""
        if not self.built:
            message = (
                f"To call `{method}`, {type(self).__name__} must be built (i.e. its "
                "variables must have been created). You can build it via "
                "`optimizer.build(trainable_variables)`."
            )
            raise StructureError(message)


def check_count(name: str, given: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise unless there is one value for each variable."""
    if len(given) != len(expected):
        message = (
            f"{name} must hold one value for each of {len(expected)} variables, got "
            f"{len(given)}. Pass [v.value for v in ...] of the variables, in order."
        )
        raise StructureError(message)


def _product(loss: Any, scale: Array) -> Any:
    """Return the loss times the scale; float16, which ends at 65504, is widened."""
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        loss = ops.convert_to_tensor(float(loss), "float32")
    if not hasattr(loss, "dtype") or dtype_of(loss) not in LARGEST:
        kind = dtype_of(loss) if hasattr(loss, "dtype") else type(loss).__name__
        message = (
            f"The loss is {kind}, expected "
            f"{', '.join(LARGEST)}. Cast it with keras.ops.cast(loss, 'float32')."
        )
        raise GradientError(message)
    if dtype_of(loss) != "float64":
        loss = ops.cast(loss, "float32")
    return ops.multiply(loss, scale)
