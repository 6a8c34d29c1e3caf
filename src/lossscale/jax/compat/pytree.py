# SPDX-License-Identifier: Apache-2.0
"""Registration of the compatible classes with JAX and with flax's serialization.

Fields that are arrays are leaves; settings are static, so they survive every use as a
pytree, and a compiled function contains them as constants.
"""

import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lossscale.core.state import Array, ScaleState
from lossscale.jax.export import register_class

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_ARRAY_FIELDS: dict[type[Any], tuple[str, ...]] = {}
"""Which fields of each class are arrays."""

_REGISTERED_WITH_FLAX: set[type[Any]] = set()


def register_pytree(
    kind: "type[DataclassInstance]", array_fields: tuple[str, ...]
) -> None:
    """Register a dataclass as a pytree: the named fields are leaves, others static."""
    _ARRAY_FIELDS[kind] = array_fields
    settings = [field.name for field in fields(kind) if field.name not in array_fields]

    def flatten(instance: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves = [
            (jax.tree_util.GetAttrKey(name), getattr(instance, name))
            for name in array_fields
        ]
        return leaves, tuple(getattr(instance, name) for name in settings)

    def unflatten(static: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        # Without the constructor: JAX also unflattens with leaves that are no arrays.
        instance = object.__new__(kind)
        values = (
            *zip(settings, static, strict=True),
            *zip(array_fields, leaves, strict=True),
        )
        for name, value in values:
            object.__setattr__(instance, name, value)
        return instance

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    register_class(kind)


def register_with_flax(kind: "type[DataclassInstance]") -> None:
    """Let flax's serialization save the leaves of a class, if flax was imported."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or kind in _REGISTERED_WITH_FLAX:
        return
    names = _ARRAY_FIELDS[kind]
    serialization.register_serialization_state(
        kind,
        lambda instance: {name: getattr(instance, name) for name in names},
        lambda instance, saved: replace(
            instance, **{name: saved[name] for name in names}
        ),
    )
    _REGISTERED_WITH_FLAX.add(kind)


def make_state(scale: Array, good_steps: Array) -> ScaleState:
    """Return the `ScaleState` of a scale and its counter of finite steps."""
    return ScaleState(
        jnp.asarray(scale, jnp.float32),
        jnp.asarray(good_steps, jnp.int32),
        jnp.zeros((), jnp.int32),
    )


def to_python_number(value: Any) -> Any:
    """Return an array of one element as a Python number; other values unchanged."""
    return value.item() if hasattr(value, "item") else value
