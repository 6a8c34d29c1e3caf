# SPDX-License-Identifier: Apache-2.0
"""The batch on torch: the explanation of the PyTorch adapter, with Keras's names."""

from dataclasses import replace
from typing import Any

import keras
import torch

from lossscale.core.explanation.findings import Explanation, Finding
from lossscale.keras.explanation.variables import KeptVariables
from lossscale.torch.grad_scaler import GradScaler


def explain(
    model: Any, batch: tuple[Any, Any, Any], scale: float, kept: KeptVariables
) -> Explanation:
    """Return why a batch was not finite."""
    x, y, sample_weight = keras.tree.map_structure(_to_tensor, batch)

    def run() -> Any:
        kept.restore()  # of seeds and statistics, which each run moves
        predicted = model(x, training=True)
        return model.compute_loss(
            x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True
        )

    device = next(iter(model.parameters())).device.type
    scaler = GradScaler(device, init_scale=scale)
    # Keras's layers are no attributes of the model that torch knows of.
    holder = torch.nn.Module()
    for index, layer in enumerate(model._flatten_layers()):  # noqa: SLF001
        holder.add_module(f"layer{index}", layer)
    seen = scaler.explain(run, module=holder)
    names = _list_names(holder, model.variables)
    return replace(
        seen,
        first=_rename(seen.first, names),
        first_nan=_rename(seen.first_nan, names),
        last_finite_gradient=_look_up(seen.last_finite_gradient, names),
        first_nonfinite_gradient=_look_up(seen.first_nonfinite_gradient, names),
    )


def _to_tensor(leaf: Any) -> Any:
    if leaf is None:
        return None
    tensor = keras.ops.convert_to_tensor(leaf)
    is_wide = keras.backend.standardize_dtype(tensor.dtype) == "float64"
    return keras.ops.cast(tensor, keras.backend.floatx()) if is_wide else tensor


def _list_names(holder: torch.nn.Module, variables: list[Any]) -> dict[str, str]:
    """Return Keras's names of modules and parameters by torch's."""
    paths = {id(variable.value): variable.path for variable in variables}
    layers = {
        name: str(module.path or module.name)
        for name, module in holder.named_modules()
        if isinstance(module, keras.layers.Layer)
    }
    params = {name: paths.get(id(p), name) for name, p in holder.named_parameters()}
    return params | layers


def _look_up(name: str | None, names: dict[str, str]) -> str | None:
    return None if name is None else names.get(name, name)


def _rename(found: Finding | None, names: dict[str, str]) -> Finding | None:
    if found is None:
        return None
    return replace(
        found,
        module=_look_up(found.module, names),
        tensor=_look_up(found.tensor, names),
    )
