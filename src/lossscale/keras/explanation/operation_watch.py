# SPDX-License-Identifier: Apache-2.0
"""What each operation that TensorFlow runs eagerly made of what."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from lossscale.core.explanation.evaluated import Location, Node
from lossscale.core.explanation.kinds import Kind
from lossscale.keras.explanation.layer_scopes import LayerScopes
from lossscale.keras.explanation.tensorflow_origins import (
    find_origin,
    find_origin_of_nan,
    measure_wide,
)


def kind_of(tensor: Any) -> Kind | None:
    """Return what a tensor has that is not finite; `None` if it is finite."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return None
    array = tensor.numpy()
    if not array.size or np.isfinite(array).all():
        return None
    infinite = array[np.isinf(array)]
    plus, minus = bool((infinite > 0).any()), bool((infinite < 0).any())
    return Kind(bool(np.isnan(array).any()), plus, minus)


class OperationWatch:
    """A context in which every operation becomes a node.

    TensorFlow calls back after each operation that it runs eagerly, in both passes; it
    is what `tf.debugging.enable_check_numerics` uses. A `tf.function` is one operation.
    """

    def __init__(self, scopes: LayerScopes, parameters: Sequence[Any]) -> None:
        """Prepare.

        Args:
            scopes: Says which layer runs.
            parameters: The variables whose values are parameters.
        """
        self._scopes = scopes
        self._parameters = {id(v.value.handle): v.path for v in parameters}
        # The tensors are kept, so that no other gets the id of one.
        self._known: dict[int, tuple[Any, Node, Kind | None]] = {}
        self._count = 0

    def __enter__(self) -> "OperationWatch":  # noqa: PYI034  # Python 3.10 has no Self
        """Have TensorFlow call back."""
        op_callbacks.add_op_callback(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        """End the calls."""
        op_callbacks.remove_op_callback(self._take)

    def add_argument(self, tensor: Any, name: str) -> None:
        """Know a tensor of the batch by its name."""
        node = self._add(tensor, Location(), None, ())
        node.argument = name
        node.origin = None if node.kind is None else "batch"

    def node_of(self, tensor: Any) -> Node | None:
        """Return what made a tensor."""
        known = self._known.get(id(tensor))
        return None if known is None else known[1]

    def _take(
        self,
        op_type: str,
        inputs: Sequence[Any],
        attrs: Any,
        outputs: Sequence[Any],
        op_name: str | None = None,
        graph: Any = None,
    ) -> None:
        """Take an operation that was run."""
        del op_name
        if graph is not None:
            return
        settings = dict(zip(attrs[::2], attrs[1::2], strict=True)) if attrs else {}
        for tensor in outputs:
            if isinstance(tensor, tf.Tensor):
                self._keep(op_type, inputs, settings, tensor)

    def _keep(
        self, op_type: str, inputs: Sequence[Any], settings: Any, tensor: Any
    ) -> None:
        node = self._add(tensor, self._scopes.current, op_type, inputs)
        node.lost_epsilon = self._find_lost_epsilon(op_type, inputs, tensor)
        if node.kind is None:
            return
        node.dtype = tensor.dtype.name
        handles = [self._parameters.get(id(value)) for value in inputs]
        if op_type in ("ReadVariableOp", "ResourceGather") and any(handles):
            node.argument = next(filter(None, handles))
            node.is_parameter, node.origin = True, "parameter"
            return
        given = [(value, self._kind_of_input(value)) for value in inputs]
        kinds = [kind for _, kind in given if kind is not None]
        arrays = [x.numpy() for x in inputs if x.dtype != tf.resource]
        if not kinds:
            largest = float(tensor.dtype.max) if tensor.dtype.is_floating else math.inf
            wide = measure_wide(op_type, arrays, settings, largest)
            node.magnitude = wide
            node.origin = find_origin(op_type, arrays, node.kind, wide=wide)
        elif not node.bad_parents:
            node.origin = "constant"
        elif node.kind.nan and not any(kind.nan for kind in kinds):
            node.origin = find_origin_of_nan(op_type, arrays, kinds)

    def _find_lost_epsilon(
        self, op_type: str, inputs: Sequence[Any], tensor: Any
    ) -> float | None:
        """Return a number that was added to a result, and that its format made 0."""
        known = [self._known.get(id(value)) for value in inputs]
        if op_type == "AddV2" and tensor.dtype in (tf.float16, tf.bfloat16):
            constants = [
                value
                for value, one in zip(inputs, known, strict=True)
                if one is None and not value.shape.rank
            ]
            return next((0.0 for value in constants if not value.numpy()), None)
        if op_type not in _PASSING or not known or known[-1] is None:
            return None
        return known[-1][1].lost_epsilon

    def _kind_of_input(self, tensor: Any) -> Kind | None:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[2]
        return None if tensor.dtype == tf.resource else kind_of(tensor)

    def _add(
        self,
        tensor: Any,
        location: Location,
        operation: str | None,
        inputs: Sequence[Any],
    ) -> Node:
        known = [self._known[id(x)] for x in inputs if id(x) in self._known]
        node = Node(
            self._count,
            location,
            operation,
            tuple(one for _, one, _ in known),
            tuple(one for _, one, kind in known if kind is not None),
            kind_of(tensor) if tensor.dtype != tf.resource else None,
        )
        self._count += 1
        self._known[id(tensor)] = (tensor, node, node.kind)
        return node


_PASSING = frozenset({"Sqrt", "Rsqrt", "RealDiv", "Log", "Cast", "Reshape", "Identity"})
"""Operations whose result is 0, or not finite, where the last thing they read is 0."""
