# SPDX-License-Identifier: Apache-2.0
"""A fault in what a Keras layer returns, at given training steps.

The layer's `call` is replaced. Forward passes are counted in a variable of the layer:
`fit` carries it on every backend, which a Python number inside a compiled step is not.
"""

from types import TracebackType
from typing import Any

import keras
from keras import ops

from lossscale.core.state import Array
from lossscale.core.validation import format_value
from lossscale.errors import ContextError, GradientError
from lossscale.keras.backend import dtype_name, where
from lossscale.testing.faults import Fault, check_name


def find_layer(model: Any, name: str) -> Any:
    """Return a layer by its path in a model, such as "dense" or "block/dense"."""
    layers = _list_layers(model, "")
    return layers[check_name(name, list(layers), "layers")]


def _list_layers(model: Any, prefix: str) -> dict[str, Any]:
    found = {}
    layers = model._flatten_layers(  # noqa: SLF001  # Keras's own
        include_self=False, recursive=False
    )
    for layer in layers:
        if not isinstance(layer, keras.layers.InputLayer):
            found[prefix + layer.name] = layer
            found |= _list_layers(layer, f"{prefix}{layer.name}/")
    return found


class OutputInjection:
    """A context in which a fault is written into a layer's output.

    Example:
        >>> import keras, numpy as np
        >>> from lossscale.keras import LossScaleOptimizer
        >>> from lossscale.testing.keras import inject
        >>> dense = keras.layers.Dense(1, name="dense")
        >>> model = keras.Sequential([keras.Input((2,)), dense])
        >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD()), "mse")
        >>> with inject(model, "dense", "nan", steps=2, where="output"):
        ...     for _ in range(3):
        ...         loss = model.train_on_batch(np.ones((1, 2)), np.ones((1, 1)))
        >>> int(model.optimizer.skipped_steps)
        1
    """

    def __init__(self, model: Any, layer: Any, fault: Fault) -> None:
        """Prepare; nothing is replaced yet."""
        self._model = model
        self._layer = layer
        self._fault = fault
        self._count: Any = None

    def __enter__(self) -> "OutputInjection":  # noqa: PYI034  # Python 3.10 has no Self
        """Replace the layer's `call`, and have `fit` compile its step again."""
        layer = self._layer
        if "call" in vars(layer):
            message = f"A fault is being injected into {layer.name} already."
            raise ContextError(message)
        self._count = keras.Variable(
            0, dtype="int32", trainable=False, name="injected_steps"
        )
        # Keras locks what a built layer tracks; its own quantization unlocks it too.
        layer._tracker.unlock()  # noqa: SLF001
        layer._track_variable(self._count)  # noqa: SLF001
        layer._tracker.lock()  # noqa: SLF001
        self._call = layer.call
        vars(layer)["call"] = self._write_output
        self._model.train_function = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the method back; raise if the last fault was never written."""
        # On JAX fit holds the values, and an access to the variables returns them.
        _ = self._model.non_trainable_variables
        del vars(self._layer)["call"]
        self._layer._untrack_variable(self._count)  # noqa: SLF001
        self._model.train_function = None
        if error is None:
            taken = int(self._count.value)
            self._fault.check_reached(self._layer.name, taken)

    def _write_output(self, *args: Any, **kwargs: Any) -> Any:
        output = self._call(*args, **kwargs)
        context = self._layer._get_call_context()  # noqa: SLF001
        if not context.training:
            return output
        step = self._count + 1
        self._count.assign(step)
        steps = ops.convert_to_tensor(self._fault.steps, "int32")
        hit = ops.any(ops.equal(step, steps))
        leaves = keras.tree.flatten(output)
        for index, leaf in enumerate(leaves):
            if ops.is_tensor(leaf) and "float" in dtype_name(leaf):
                leaves[index] = self._write_into(leaf, hit)
                return keras.tree.pack_sequence_as(output, leaves)
        message = (
            f"{self._layer.name} returned no floating-point tensor: "
            f"{format_value(output)}."
        )
        raise GradientError(message)

    def _write_into(self, tensor: Array, hit: Array) -> Array:
        fault, shape = self._fault, ops.shape(tensor)
        number = fault.number(self._layer.name, dtype_name(tensor))
        mask = ops.broadcast_to(hit, shape)
        if fault.element is not None:
            chosen = ops.equal(ops.arange(ops.size(tensor)), fault.element)
            mask = ops.logical_and(mask, ops.reshape(chosen, shape))

        def write(inner: Array) -> tuple[Array, Any]:
            def pass_on(*args: Array, upstream: Array | None = None) -> Array:
                return args[0] if upstream is None else upstream

            value = ops.convert_to_tensor(number, dtype_name(inner))
            return where(mask, value, inner), pass_on

        return ops.custom_gradient(write)(tensor)
