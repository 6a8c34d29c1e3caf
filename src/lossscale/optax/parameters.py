# SPDX-License-Identifier: Apache-2.0
"""What the optimizer inside sees of parameters and gradients, and what it hands back.

It sees float16 and bfloat16 parameters in float32. It sees no integers, keys or other
leaves that cannot be differentiated: they are `MaskedNode`s, as inside `optax.masked`.
Updates come back in the dtype of the gradients, as optax's own do, and are zero where
a float16 parameter could not hold the sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lossscale.core import headroom


def widen(params: Any) -> Any:
    """Return parameters as the optimizer inside sees them."""

    def show(leaf: Any) -> Any:
        if _is_hidden(leaf):
            return optax.MaskedNode()
        # optax.tree_map_params calls init with a leaf that is no array at all.
        if str(getattr(leaf, "dtype", None)) not in headroom.NARROW:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
        return leaf.astype(jnp.float32)

    return jax.tree.map(show, params)


def hide(grads: Any, params: Any) -> Any:
    """Return gradients without those of parameters that the optimizer does not see.

    Such a gradient is `float0`, as `jax.grad` returns it, or `None`, as our
    `value_and_grad` does.
    """
    came, structure = jax.tree.flatten(grads, is_leaf=_is_absent)
    pairs = zip(came, _align(structure, params), strict=True)
    shown = [
        optax.MaskedNode() if _is_hidden(grad) or _is_hidden(param) else grad
        for grad, param in pairs
    ]
    return jax.tree.unflatten(structure, shown)


def limit(updates: Any, grads: Any, params: Any) -> Any:
    """Return updates in the gradients' dtype, and not too large for float16 parameters.

    Args:
        updates: What the optimizer inside returned.
        grads: The gradients as the caller gave them.
        params: The parameters as the caller gave them, or None.
    """
    came, structure = jax.tree.flatten(grads, is_leaf=_is_absent)
    try:
        found = structure.flatten_up_to(updates)
    except ValueError:
        return updates  # of a structure of its own
    rows = zip(found, came, _align(structure, params), strict=True)
    return jax.tree.unflatten(structure, [_limit(*row) for row in rows])


def _limit(update: Any, grad: Any, param: Any) -> Any:
    """Return one update."""
    if isinstance(update, optax.MaskedNode):
        # Hidden by us, or by a mask around us.
        return jnp.zeros_like(param) if _is_number(param) else grad
    if not hasattr(update, "dtype") or update.dtype == jax.dtypes.float0:
        return update
    if _is_float(getattr(grad, "dtype", None)) and _is_float(update.dtype):
        update = update.astype(grad.dtype)
    if getattr(param, "dtype", None) != jnp.float16:
        # To leave float32 from within, a sum needs an addend of 1e31.
        return update
    wide = update.astype(jnp.float32) + param.astype(jnp.float32)
    fits = jnp.isfinite(wide.astype(jnp.float16)) | ~jnp.isfinite(param)
    return jnp.where(fits, update, jnp.zeros_like(update))


def _align(structure: Any, params: Any) -> list[Any]:
    """Return the parameter of every gradient; None where there is none to be found."""
    try:
        return list(structure.flatten_up_to(params))
    except ValueError:
        return [None] * int(structure.num_leaves)


def _is_hidden(leaf: Any) -> bool:
    """Whether a leaf cannot be differentiated, or is the gradient of such a one."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, int)  # bool is one
    return not jnp.issubdtype(dtype, jnp.inexact)


def _is_number(leaf: Any) -> bool:
    """Whether zeros can be made of a leaf, and added to it."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, int)
    return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.number)


def _is_float(dtype: Any) -> bool:
    """Whether this is a real floating-point dtype."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _is_absent(node: Any) -> bool:
    """Whether a node stands for a gradient that is not there."""
    return node is None or isinstance(node, optax.MaskedNode)
