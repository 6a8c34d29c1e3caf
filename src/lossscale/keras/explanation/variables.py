# SPDX-License-Identifier: Apache-2.0
"""The values of a model's variables, kept and put back."""

from typing import Any

import numpy as np

from lossscale.keras.backend import to_host


class KeptVariables:
    """The values of weights, seeds, metrics and optimizer variables."""

    def __init__(self, model: Any) -> None:
        """Copy every value to the host."""
        optimizer = getattr(model, "optimizer", None)
        listed = [
            *model.variables,
            *model.metrics_variables,
            *_list_seeds(model),
            *(() if optimizer is None else optimizer.variables),
        ]
        unique = {id(variable): variable for variable in listed}
        self._pairs = [(v, np.array(to_host(v.value))) for v in unique.values()]

    def restore(self) -> None:
        """Assign what has changed; to assign everything would cost more."""
        for variable, kept in self._pairs:
            if to_host(variable.value).tobytes() != kept.tobytes():
                variable.assign(kept)


def _list_seeds(model: Any) -> list[Any]:
    """Return the states of the random generators of all layers."""
    generators = [
        generator
        for layer in model._flatten_layers()  # noqa: SLF001  # Keras's own traversal
        for generator in getattr(layer, "_seed_generators", ())
    ]
    return [generator.state for generator in generators]
