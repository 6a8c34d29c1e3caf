# SPDX-License-Identifier: Apache-2.0
"""Names for the types in the adapter's signatures."""

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import numpy as np

PyTree: TypeAlias = Any
"""Nested containers that JAX flattens into leaves, or one leaf."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf, as `jax.tree_util.tree_flatten_with_path` returns it."""

LeafPredicate: TypeAlias = Callable[[KeyPath, Any], bool]
"""Decides by its key path and value whether a leaf belongs to a group of leaves."""

DType: TypeAlias = np.dtype[Any] | type[Any]
"""A dtype, or a scalar type such as `jnp.float32`."""

AxisName: TypeAlias = Hashable
"""A mapped axis, a tuple of mapped axes, or None."""
