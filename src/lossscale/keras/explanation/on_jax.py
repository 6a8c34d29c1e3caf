# SPDX-License-Identifier: Apache-2.0
"""The batch on JAX: `stateless_call`, whose jaxpr is evaluated one by one.

Keras gives each layer a named scope on JAX.
"""

from dataclasses import replace
from typing import Any

import jax
import keras
import numpy as np

from lossscale.core.explanation.findings import Explanation, Finding
from lossscale.jax.explanation.explainer import explain_program
from lossscale.keras.explanation.variables import KeptVariables


def explain(
    model: Any, batch: tuple[Any, Any, Any], scale: float, kept: KeptVariables
) -> Explanation:
    """Return why a batch was not finite."""
    del kept  # nothing is assigned
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.metrics_variables,
    )
    counts = [len(variables) for variables in lists]
    values = [variable.value for variables in lists for variable in variables]
    data, structure = jax.tree.flatten(batch)
    data = [_to_array(leaf) for leaf in data]
    names = [variable.path for variables in lists for variable in variables]
    paths = jax.tree_util.tree_flatten_with_path(batch)[0]
    names += [_name_batch(path) for path, _ in paths]

    def run(scale: Any, leaves: list[Any]) -> tuple[Any, Any]:
        trainable = leaves[: counts[0]]
        others = leaves[counts[0] : counts[0] + counts[1]]
        metrics = leaves[counts[0] + counts[1] : sum(counts)]
        x, y, sample_weight = jax.tree.unflatten(structure, leaves[sum(counts) :])

        def scaled(trainable: list[Any]) -> tuple[Any, Any]:
            loss, _ = model.compute_loss_and_updates(
                *(trainable, others, metrics, x, y, sample_weight),
                training=True,
                # Without an optimizer's variables the loss is not scaled, so that it is
                # scaled here, by a scale that can be lowered.
                optimizer_variables=None,
            )
            wide = loss if loss.dtype == np.float64 else loss.astype(np.float32)
            return wide * scale.astype(wide.dtype), loss

        with _WithoutOptimizer(model):
            (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(trainable)
        return loss, grads

    flags = [index < counts[0] for index in range(len(names))]
    seen = explain_program(
        run,
        scale,
        [*values, *data],
        names=names,
        parameters=flags,
        gradient_names=names[: counts[0]],
    )
    layers = {layer.name: layer for layer in model._flatten_layers()}  # noqa: SLF001
    return replace(
        seen,
        first=_name_layer(seen.first, layers, model),
        first_nan=_name_layer(seen.first_nan, layers, model),
    )


def _name_layer(
    found: Finding | None, layers: dict[str, Any], model: Any
) -> Finding | None:
    """Return a finding with the layer of its innermost scope."""
    if found is None or found.module is None:
        return found
    scopes = found.module.split("/")
    layer = next((layers[name] for name in scopes[::-1] if name in layers), None)
    if layer is None and found.module in _BASES:
        layer = model  # between its layers
    if layer is None:
        return replace(found, module_type=None)
    return replace(
        found, module=layer.path or layer.name, module_type=type(layer).__name__
    )


_BASES = ("Layer", "Operation", "Functional", "Sequential", "Model")
"""Classes of Keras that cast what a layer reads, before its scope begins."""


class _WithoutOptimizer:
    """Keeps Keras from scaling the loss a second time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._optimizer = model.optimizer

    def __enter__(self) -> None:
        vars(self._model)["optimizer"] = None

    def __exit__(self, *_: object) -> None:
        vars(self._model)["optimizer"] = self._optimizer


def _to_array(leaf: Any) -> Any:
    """Return an array of the batch as `fit` converts it."""
    array = keras.ops.convert_to_tensor(leaf)
    is_wide = array.dtype == np.float64
    return array.astype(keras.backend.floatx()) if is_wide else array


def _name_batch(path: Any) -> str:
    name = ("x", "y", "sample_weight")[path[0].idx]
    return f"{name}{jax.tree_util.keystr(path[1:])}"
