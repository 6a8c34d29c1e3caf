# SPDX-License-Identifier: Apache-2.0
"""Registration of the adapter's tuples and classes with `jax.export`.

A compiled function that takes or returns one of them can be serialized, and loaded in
another process that has imported `lossscale.jax` (or `lossscale.optax`).
"""

import json
from typing import Any

from jax import export


def register_tuple(kind: type[Any]) -> None:
    """Register a NamedTuple under its public name."""
    export.register_namedtuple_serialization(
        kind, serialized_name=_get_serialized_name(kind)
    )


def register_class(kind: type[Any]) -> None:
    """Register a class whose static part is a tuple of plain numbers."""
    export.register_pytree_node_serialization(
        kind,
        serialized_name=_get_serialized_name(kind),
        serialize_auxdata=lambda static: json.dumps(static, default=float).encode(),
        deserialize_auxdata=lambda data: tuple(json.loads(data)),
    )


def _get_serialized_name(kind: type[Any]) -> str:
    return f"lossscale.{kind.__name__}"
