# SPDX-License-Identifier: Apache-2.0
"""Which leaf it was: flags for every gradient, made in the pass that looks at them all.

`leaf_flags` runs inside `jit` and returns two rows of booleans; `bad_leaves` runs
outside and gives them names. The names are known without the device, so nothing but
the rows is brought to the host, and only if somebody asks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.state import Array
from lossscale.core.validation import format_value
from lossscale.errors import StructureError
from lossscale.jax import leaves
from lossscale.jax.agreement import is_named
from lossscale.jax.leaves import AsIs, overwritten


class LeafFlags(NamedTuple):
    """What is wrong with each gradient; one boolean for each, in the tree's order.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> flags = ls.leaf_flags([jnp.array([1.0, jnp.inf]), jnp.array([jnp.nan])])
        >>> flags.finite.tolist(), flags.nan.tolist()
        ([False, False], [False, True])
    """

    finite: Array
    """Whether all numbers of a gradient are finite."""
    nan: Array
    """Whether any of them is NaN."""


def leaf_flags(
    grads: Any, *, axis_name: Any = None, as_is: AsIs = overwritten
) -> LeafFlags:
    """Return flags for every gradient; under `jit`, at no further read of them.

    Args:
        grads: The gradients that `unscale` or `value_and_grad` returned.
        axis_name: The mapped axes whose devices are asked; see `unscale`.
        as_is: Which leaves are no gradients; see `unscale`.

    Raises:
        GradientError: If a gradient is not floating-point.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> grads = {"kernel": jnp.array([jnp.nan]), "bias": jnp.array([1.0])}
        >>> ls.bad_leaves(grads, ls.leaf_flags(grads))
        {"['kernel']": 'nan'}
    """
    found = [leaf for _, leaf in leaves.gradient_leaves(grads, as_is)]
    if not found:
        nothing = jnp.zeros((0,), jnp.bool_)
        return LeafFlags(nothing, nothing)
    finite = jnp.stack([leaves.is_finite(leaf) for leaf in found])
    nan = jnp.stack([jnp.any(jnp.isnan(leaf)) for leaf in found])
    if not is_named(axis_name):
        return LeafFlags(finite, nan)
    worst = jax.lax.pmax((~finite).astype(jnp.int32) + nan.astype(jnp.int32), axis_name)
    return LeafFlags(worst == 0, worst == _NAN)


_NAN = 2
"""Not finite, and NaN."""


def bad_leaves(
    tree: Any, flags: LeafFlags, *, as_is: AsIs = overwritten
) -> dict[str, str]:
    """Return the paths of the gradients that were not finite: each "inf" or "nan".

    This waits for the device. A gradient that holds both is a "nan".

    Args:
        tree: The gradients, or anything of their structure; its values are not read.
        flags: What `leaf_flags` returned for them.
        as_is: What `leaf_flags` was given.

    Raises:
        StructureError: If there are more or fewer gradients than flags.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> grads = {"kernel": jnp.array([-jnp.inf]), "bias": jnp.array([1.0])}
        >>> ls.bad_leaves(grads, ls.leaf_flags(grads))
        {"['kernel']": 'inf'}
    """
    paths = [path for path, _ in leaves.gradient_leaves(tree, as_is)]
    finite, nan = (np.asarray(row) for row in flags)
    if finite.shape != (len(paths),):
        message = (
            f"There are flags of shape {finite.shape} and {len(paths)} gradients: "
            f"{format_value(paths)}. Pass the tree whose flags these are."
        )
        raise StructureError(message)
    rows = zip(paths, finite, nan, strict=True)
    return {path: "nan" if nan else "inf" for path, good, nan in rows if not good}
