# SPDX-License-Identifier: Apache-2.0
"""Conversion of parameters and gradients for the wrapped optimizer, and of its updates.

The wrapped optimizer receives float16 and bfloat16 parameters in float32. Integers,
keys and other leaves that cannot be differentiated are replaced by `MaskedNode`s, as in
`optax.masked`. Updates are returned in the dtype of the gradients, as optax's own are,
and are zero where adding them to a float16 parameter would overflow.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lossscale.core import headroom
from lossscale.core.validation import format_value
from lossscale.errors import SettingTypeError, StructureError
from lossscale.jax.selection import list_paths
from lossscale.jax.types import PyTree


def check_optimizer(name: str, optimizer: object) -> None:
    """Raise unless this is an optax optimizer."""
    if isinstance(optimizer, type) or not (
        hasattr(optimizer, "init") and hasattr(optimizer, "update")
    ):
        message = (
            f"{name} must be an optax optimizer, such as optax.adam(1e-3), got "
            f"{format_value(optimizer)}."
        )
        raise SettingTypeError(message)


def check_gradients_fit(grads: PyTree, params: PyTree) -> None:
    """Raise if gradients do not have the structure of the parameters, if those are."""
    structure: Any = jax.tree.structure(grads, is_leaf=_is_absent)
    try:
        _flatten_up_to(structure, params)
    except ValueError:
        if params is None:
            return
    else:
        return
    grad_paths, param_paths = list_paths(grads), list_paths(params)
    only_grads = [path for path in grad_paths if path not in param_paths]
    only_params = [path for path in param_paths if path not in grad_paths]
    message = (
        "The gradients do not have the structure of the parameters: only the gradients "
        f"have {format_value(only_grads)}, only the parameters "
        f"{format_value(only_params)}. Pass the gradients of all params that "
        "init(params) was given."
    )
    raise StructureError(message)


def upcast(params: PyTree) -> PyTree:
    """Return parameters as the wrapped optimizer receives them."""

    def upcast_leaf(leaf: Any) -> Any:
        if _is_masked(leaf):
            return optax.MaskedNode()
        # optax.tree_map_params calls init with leaves that are no arrays.
        if str(getattr(leaf, "dtype", None)) not in headroom.NARROW:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
        return leaf.astype(jnp.float32)

    return jax.tree.map(upcast_leaf, params)


def mask(grads: PyTree, params: PyTree) -> PyTree:
    """Mask the gradients of parameters that the wrapped optimizer does not receive.

    Such a gradient is `float0`, as `jax.grad` returns it, or `None`, as
    `lossscale.jax.value_and_grad` does.
    """
    leaves, structure = jax.tree.flatten(grads, is_leaf=_is_absent)
    pairs = zip(leaves, _align(structure, params), strict=True)
    masked = [
        optax.MaskedNode() if _is_masked(grad) or _is_masked(param) else grad
        for grad, param in pairs
    ]
    return jax.tree.unflatten(structure, masked)


def limit(updates: PyTree, grads: PyTree, params: PyTree) -> PyTree:
    """Return updates in the gradients' dtype, and not too large for float16 parameters.

    Args:
        updates: What the wrapped optimizer returned.
        grads: The gradients that the caller passed.
        params: The parameters that the caller passed, or None.
    """
    grad_leaves, structure = jax.tree.flatten(grads, is_leaf=_is_absent)
    try:
        update_leaves = _flatten_up_to(structure, updates)
    except ValueError:
        return updates  # its structure is not that of the gradients
    rows = zip(update_leaves, grad_leaves, _align(structure, params), strict=True)
    return jax.tree.unflatten(structure, [_limit_leaf(*row) for row in rows])


def _limit_leaf(update: Any, grad: Any, param: Any) -> Any:
    """Return one update."""
    if isinstance(update, optax.MaskedNode):
        # Masked here, or by an optax.masked around the optimizer.
        return jnp.zeros_like(param) if _is_number(param) else grad
    if not hasattr(update, "dtype") or update.dtype == jax.dtypes.float0:
        return update
    if _is_float(getattr(grad, "dtype", None)) and _is_float(update.dtype):
        update = update.astype(grad.dtype)
    if getattr(param, "dtype", None) != jnp.float16:
        # A finite sum overflows float32 only with an addend of 1e31 or more.
        return update
    total = update.astype(jnp.float32) + param.astype(jnp.float32)
    fits = jnp.isfinite(total.astype(jnp.float16)) | ~jnp.isfinite(param)
    return jnp.where(fits, update, jnp.zeros_like(update))


def _flatten_up_to(structure: Any, tree: PyTree) -> list[Any]:
    return list(structure.flatten_up_to(tree))


def _align(structure: Any, params: PyTree) -> list[Any]:
    """Return the parameter of every gradient; None if the structures differ."""
    try:
        return _flatten_up_to(structure, params)
    except ValueError:
        return [None] * int(structure.num_leaves)


def _is_masked(leaf: object) -> bool:
    """Whether a leaf cannot be differentiated, or is the gradient of such a leaf."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, int)  # which bool is, too
    return not jnp.issubdtype(dtype, jnp.inexact)


def _is_number(leaf: object) -> bool:
    """Whether a zero of the leaf's shape can be added to it."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, int)
    return dtype == jnp.bool_ or bool(jnp.issubdtype(dtype, jnp.number))


def _is_float(dtype: Any) -> bool:
    """Whether this is a real floating-point dtype."""
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def _is_absent(node: object) -> bool:
    """Whether a node represents a missing gradient."""
    return node is None or isinstance(node, optax.MaskedNode)
