# SPDX-License-Identifier: Apache-2.0
"""Taking a step or leaving it: `select`, and `apply_if_finite`, which saves the work.

`select` computes both sides and chooses. `apply_if_finite` is `lax.cond`: the
optimizer does not run on a skipped step. Under `vmap` a condition becomes a choice, and
nothing is saved.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.validation import format_value
from lossscale.errors import StructureError
from lossscale.jax import leaves
from lossscale.jax.leaves import KeyPath


def select(finite: Any, new: Any, old: Any) -> Any:
    """Return `new` if the step was finite, else `old`: for a whole train state.

    Put in whatever belongs to a step that was taken: parameters, optimizer state, batch
    statistics, moving averages, the step count. A leaf that is the same object in both
    stays, whatever it is; functions, texts and other leaves that are no arrays must be
    equal. With a Python boolean one of the two comes back as it is.

    Args:
        finite: One boolean: `signal.finite`, not the signal.
        new: A pytree.
        old: A pytree of the same structure, with the same shapes and dtypes.

    Raises:
        GradientError: If `finite` is anything but one boolean.
        StructureError: If the two do not have the same structure, or if two leaves
            cannot stand for each other.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> new, old = {"step": jnp.int32(7)}, {"step": jnp.int32(6)}
        >>> ls.select(jnp.bool_(False), new, old)
        {'step': Array(6, dtype=int32)}
    """
    chosen = leaves.flag(finite)
    check_same_structure(new, old)
    if isinstance(finite, (bool, np.bool_)):
        return new if finite else old

    def choose(path: KeyPath, first: Any, second: Any) -> Any:
        return _choose(path, chosen, first, second)

    return jax.tree_util.tree_map_with_path(choose, new, old)


def apply_if_finite(
    finite: Any, function: Callable[..., Any], old: Any, *operands: Any
) -> Any:
    """Return `function(old, *operands)` if the step was finite, else `old`.

    The function is not run on a skipped step. It takes the train state and returns
    the next one, of the same structure, shapes and dtypes. Hand gradients over as
    operands: buffers that a function closes over cannot be used again.

    Args:
        finite: One boolean: `signal.finite`, not the signal.
        function: Makes the new state of the old one and the operands.
        old: The state before the step: a pytree of arrays.
        *operands: What else the function takes, such as the gradients.

    Raises:
        GradientError: If `finite` is anything but one boolean.
        TypeError: JAX's own, if the function returns another kind of state.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> def step(weight, gradient):
        ...     return weight - gradient
        >>> weight, gradient = jnp.float32(3.0), jnp.float32(1.0)
        >>> ls.apply_if_finite(jnp.bool_(True), step, weight, gradient)
        Array(2., dtype=float32)
    """

    def keep(state: Any, *unused: Any) -> Any:
        del unused
        return state

    return jax.lax.cond(leaves.flag(finite), function, keep, old, *operands)


def check_same_structure(new: Any, old: Any) -> None:
    """Raise a `StructureError` that names the first place where two trees differ."""
    if jax.tree.structure(new) == jax.tree.structure(old):
        return
    paths = [
        [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(t)
        ]
        for t in (new, old)
    ]
    only_new = [path for path in paths[0] if path not in paths[1]]
    only_old = [path for path in paths[1] if path not in paths[0]]
    if only_new or only_old:
        message = (
            f"The two structures differ: only the new one has "
            f"{format_value(only_new)}, "
            f"only the old one {format_value(only_old)}."
        )
    else:
        message = (
            "The two structures have the same leaves and differ in their containers or "
            f"static parts: {format_value(jax.tree.structure(new))} against "
            f"{format_value(jax.tree.structure(old))}."
        )
    raise StructureError(message)


def _choose(path: KeyPath, chosen: Any, new: Any, old: Any) -> Any:
    """Return one of two leaves; the other's NaN does not matter."""
    if new is old:
        return new
    place = jax.tree_util.keystr(path) or "the top"
    if not _is_array(new) or not _is_array(old):
        if type(new) is type(old) and new == old:
            return new
        message = (
            f"The two leaves at {place} are {format_value(new)} and "
            f"{format_value(old)}. Under jit "
            "only arrays can be chosen from: make arrays of them, or keep them out."
        )
        raise StructureError(message)
    kinds = [(jnp.result_type(leaf), jnp.shape(leaf)) for leaf in (new, old)]
    if kinds[0] != kinds[1]:
        shapes = " and ".join(f"{dtype} {shape}" for dtype, shape in kinds)
        message = f"The two leaves at {place} differ: {shapes}."
        raise StructureError(message)
    if kinds[0][0] == jax.dtypes.float0:
        return new  # it holds nothing
    return jnp.where(chosen, new, old)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is something that an array can be made of."""
    return isinstance(
        leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    )
