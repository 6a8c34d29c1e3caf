# SPDX-License-Identifier: Apache-2.0
"""What the drop-ins share: how a class becomes a tree, and is known to flax.

Fields that are arrays are leaves; settings are static, so they survive every way
through a tree, and a compiled function has them as constants.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from lossscale.core.state import ScaleState
from lossscale.jax.exporting import register_class

_LEAVES: dict[Any, tuple[str, ...]] = {}
"""Which fields of each class are arrays."""

_KNOWN_TO_FLAX: set[Any] = set()


def register(kind: Any, names: tuple[str, ...]) -> None:
    """Make a class a tree of its named fields; the others are static."""
    _LEAVES[kind] = names
    settings = [name for name in kind.__dataclass_fields__ if name not in names]

    def flatten(one: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves = [
            (jax.tree_util.GetAttrKey(name), getattr(one, name)) for name in names
        ]
        return leaves, tuple(getattr(one, name) for name in settings)

    def unflatten(static: tuple[Any, ...], leaves: Sequence[Any]) -> Any:
        # Not by the constructor: JAX puts things in place of leaves that are no arrays.
        one = object.__new__(kind)
        values = (*zip(settings, static, strict=True), *zip(names, leaves, strict=True))
        for name, value in values:
            object.__setattr__(one, name, value)
        return one

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    register_class(kind)


def tell_flax(kind: Any) -> None:
    """Have flax save the leaves of a class, if flax is there."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or kind in _KNOWN_TO_FLAX:
        return
    names = _LEAVES[kind]
    serialization.register_serialization_state(
        kind,
        lambda one: {name: getattr(one, name) for name in names},
        lambda one, saved: replace(one, **{name: saved[name] for name in names}),
    )
    _KNOWN_TO_FLAX.add(kind)


def state(scale: Any, good: Any) -> ScaleState:
    """Return a scale and its counter as the verbs take them."""
    return ScaleState(
        jnp.asarray(scale, jnp.float32),
        jnp.asarray(good, jnp.int32),
        jnp.zeros((), jnp.int32),
    )


def number(value: Any) -> Any:
    """Return a Python number of an array of one; anything else as it is."""
    return value.item() if hasattr(value, "item") else value
