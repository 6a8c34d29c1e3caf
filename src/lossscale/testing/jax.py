# SPDX-License-Identifier: Apache-2.0
"""`inject` for JAX: a tree with a fault in it at given steps, or in its gradient."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from lossscale.core.validation import check_choice
from lossscale.testing.faults import Fault, FaultValue, check_name


def inject(
    tree: Any,
    name: str,
    value: FaultValue,
    *,
    step: int | jax.Array,
    steps: int | Iterable[int],
    where: str = "value",
    element: int | None = 0,
) -> Any:
    """Return the same tree, and at given steps one leaf of it with a fault.

    A pure function: it works inside `jit`, `grad`, `scan` and `vmap`, where `step` is
    traced.

    Args:
        tree: A pytree: gradients, parameters or activations.
        name: Which leaf, by its key path, such as `"['dense']['kernel']"`; `""` if the
            tree is an array.
        value: "inf", "-inf", "nan", "huge" (the largest finite number) or a number.
        step: Which step this is.
        steps: The steps at which the fault is written, from 1.
        where: "value" writes into the leaf. "gradient" leaves it, and writes into its
            gradient in the backward pass: into the scaled gradient, if the loss is
            scaled.
        element: Which number of the leaf, counted as in `ravel`; `None` for all.

    Raises:
        SettingError: If there is no such leaf, element, step or fault.
        SettingTypeError: If the leaf is not floating-point.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lossscale.testing.jax import inject
        >>> def loss(params, step):
        ...     params = inject(
        ...         params, "['w']", "nan", step=step, steps=2, where="gradient"
        ...     )
        ...     return jnp.sum(params["w"])
        >>> grad = jax.jit(jax.grad(loss))
        >>> [grad({"w": jnp.ones(2)}, step)["w"].tolist() for step in (1, 2)]
        [[1.0, 1.0], [nan, 1.0]]
    """
    fault = Fault.check(value, steps, element)
    check_choice("where", where, ("value", "gradient"))
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, _ in pairs]
    index = names.index(check_name(name, names, "leaves"))
    leaves = [leaf for _, leaf in pairs]
    leaf = jnp.asarray(leaves[index])
    fault.check_size(name or "the array", leaf.size)
    number = fault.number(name or "the array", str(leaf.dtype))
    hit = jnp.isin(jnp.asarray(step), jnp.asarray(fault.steps))
    write = _write if where == "value" else _write_into_gradient
    leaves[index] = write(leaf, hit, number, fault.element)
    return jax.tree_util.tree_unflatten(structure, leaves)


def _write(
    leaf: jax.Array, hit: jax.Array, number: float, element: int | None
) -> jax.Array:
    selected = True if element is None else jnp.arange(leaf.size) == element
    mask = jnp.broadcast_to(selected, (leaf.size,)).reshape(leaf.shape)
    return jnp.where(mask & hit, jnp.asarray(number, leaf.dtype), leaf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _write_into_gradient(
    leaf: jax.Array,
    hit: jax.Array,
    number: float,
    element: int | None,
) -> jax.Array:
    del hit, number, element
    return leaf


def _forward(
    leaf: jax.Array, hit: jax.Array, number: float, element: int | None
) -> tuple[jax.Array, jax.Array]:
    del number, element
    return leaf, hit


def _backward(
    number: float, element: int | None, hit: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    return _write(gradient, hit, number, element), None


_write_into_gradient.defvjp(_forward, _backward)
