# SPDX-License-Identifier: Apache-2.0
"""`explain`: runs one batch again and says which layer first left its format."""

import importlib
from typing import Any

import keras

from lossscale.core.explanation.findings import Explanation
from lossscale.core.validation import check_scale, format_value
from lossscale.errors import ContextError, SettingTypeError
from lossscale.keras.backend import to_host
from lossscale.keras.explanation.variables import KeptVariables
from lossscale.keras.tracing import is_traced, would_become_constant


def explain(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    scale: float | None = None,
) -> Explanation:
    """Run one batch again, and say which layer first left its number format.

    The batch is run forward and backward as `fit` runs it, with `training=True`, once
    with every operation inspected, which takes seconds rather than milliseconds. If a
    gradient overflowed, it is run up to four times at lower scales. Weights, metrics,
    random seeds and the optimizer's variables are what they were before, also if the
    model raises.

    On JAX the program is evaluated equation by equation, on TensorFlow the layers are
    called eagerly, on torch it is what `GradScaler.explain` does.

    Args:
        model: A model that is built and compiled.
        x: The inputs of the batch, as for `fit`.
        y: Its targets.
        sample_weight: Weights of its samples.
        scale: The loss scale; by default the one that the optimizer has now, or 1 if it
            does not scale. While `fit` runs on JAX, the scale must be given.

    Raises:
        SettingTypeError: If it is not a model.
        SettingError: If the scale is not positive and finite.
        ContextError: If the model is not built and compiled, or if a graph is traced.

    Example:
        >>> import keras, numpy as np
        >>> from lossscale.keras import explain
        >>> keras.utils.set_random_seed(0)
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> batch = np.array([[1.0, np.nan]])
        >>> seen = explain(model, batch, np.ones((1, 1)))
        >>> seen.loss_finite, seen.lower_scale_helps
        (False, False)
    """
    if not isinstance(model, keras.Model):
        message = (
            f"The model must be a keras.Model, got {format_value(model)} "
            f"({type(model).__name__})."
        )
        raise SettingTypeError(message)
    if not model.built or not getattr(model, "compiled", False):
        message = (
            "The model is not built and compiled, so it has no weights or no loss yet. "
            "Call model.build(...) and model.compile(optimizer, loss)."
        )
        raise ContextError(message)
    weights = [variable.value for variable in model.trainable_variables]
    if is_traced() or any(map(would_become_constant, weights[:1])):
        message = (
            "explain() was called while a graph or a jitted function is traced, where "
            "there are no numbers. Call it outside, with the arrays of the batch."
        )
        raise ContextError(message)
    number = _read_scale(model.optimizer) if scale is None else scale
    number = check_scale("scale", number)
    backend = keras.backend.backend()
    module = importlib.import_module(f"lossscale.keras.explanation.on_{backend}")
    kept = KeptVariables(model)
    try:
        seen: Explanation = module.explain(model, (x, y, sample_weight), number, kept)
    finally:
        kept.restore()
    return seen


def _read_scale(optimizer: Any) -> float:
    """Return the scale that an optimizer has now; 1 if it does not scale.

    Before the first batch it is the one to start with, of which there is no variable.
    """
    scale = getattr(optimizer, "dynamic_scale", None)
    if scale is None:
        return float(getattr(optimizer, "initial_scale", 1.0))
    return float(to_host(scale.value))
