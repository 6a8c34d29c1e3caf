# SPDX-License-Identifier: Apache-2.0
"""Which layer an operation of TensorFlow is in, in both passes.

Every layer's `call` is replaced for the time of a run. What goes into a layer and what
comes out of it passes an identity, whose derivative says in the backward pass that the
layer is entered or left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from lossscale.core.explanation.evaluated import Location


class LayerScopes:
    """A context in which the layers of a model say when they run."""

    def __init__(self, model: Any) -> None:
        """Prepare; nothing is replaced yet."""
        layers = model._flatten_layers(include_self=False)  # noqa: SLF001  # Keras's own
        self._layers = [layer for layer in layers if "call" not in vars(layer)]
        self._stack: list[Location] = []
        self.current = Location()
        """Where the operation is that runs now."""

    def __enter__(self) -> "LayerScopes":  # noqa: PYI034  # Python 3.10 has no Self
        """Replace the layers' `call`."""
        for layer in self._layers:
            vars(layer)["call"] = self._wrap(layer, layer.call)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the layers' methods back."""
        for layer in self._layers:
            del vars(layer)["call"]

    @contextmanager
    def within(self, layer: Any) -> Iterator[None]:
        """Return a context in which operations outside other layers are of this one."""
        outer, self.current = self.current, _location_of(layer)
        try:
            yield
        finally:
            self.current = outer

    def _wrap(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        own = _location_of(layer)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outer = self.current
            self.current = own
            args = keras.tree.map_structure(lambda x: self._mark(x, own, outer), args)
            result = call(*args, **kwargs)
            result = keras.tree.map_structure(lambda x: self._mark(x, own, own), result)
            self.current = outer
            return result

        return wrapped

    def _mark(self, value: Any, within: Location, after: Location) -> Any:
        """Return a tensor whose gradient says where the backward pass is.

        Args:
            value: Anything; what is not a floating-point tensor is returned as it is.
            within: Where its gradient is passed on.
            after: Where the backward pass is then.
        """
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value

        @tf.custom_gradient
        def identity(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            def pass_on(gradient: Any) -> Any:
                self.current = within
                result = tf.identity(gradient)
                self.current = after
                return result

            return tf.identity(x), pass_on

        return identity(value)


def _location_of(layer: Any) -> Location:
    return Location(layer.path or layer.name, type(layer).__name__)
