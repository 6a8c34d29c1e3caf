# SPDX-License-Identifier: Apache-2.0
"""Which leaf it was: flags for every gradient, made in the pass that looks at them all.

`leaf_flags` runs inside `jit` and returns three rows of booleans; `bad_leaves` runs
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
    too_large: Array
    """Whether all of them are finite, and one cannot be squared."""


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
        return LeafFlags(nothing, nothing, nothing)
    checked = [leaves.check([leaves.widened(leaf)]) for leaf in found]
    finite, squarable = (jnp.stack(row) for row in zip(*checked, strict=True))
    nan = jnp.stack([jnp.any(jnp.isnan(leaf)) for leaf in found])
    if not is_named(axis_name):
        return LeafFlags(finite, nan, finite & ~squarable)
    worst = sum(flags.astype(jnp.int32) for flags in (~squarable, ~finite, nan))
    worst = jax.lax.pmax(worst, axis_name)
    return LeafFlags(worst < _INFINITE, worst == _NAN, worst == _TOO_LARGE)


_TOO_LARGE, _INFINITE, _NAN = 1, 2, 3
"""How bad a gradient is, in this order."""


def bad_leaves(
    tree: Any, flags: LeafFlags, *, as_is: AsIs = overwritten
) -> dict[str, str]:
    """Return the paths of the gradients because of which a step was skipped.

    Each is "inf", "nan" or "too large". A gradient that holds several is a "nan" rather
    than an "inf", and an "inf" rather than "too large". This waits for the device.

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
    finite, nan, too_large = (np.asarray(row) for row in flags)
    if finite.shape != (len(paths),):
        message = (
            f"There are flags of shape {finite.shape} and {len(paths)} gradients: "
            f"{format_value(paths)}. Pass the tree whose flags these are."
        )
        raise StructureError(message)
    kinds = np.select([nan, ~finite, too_large], ["nan", "inf", "too large"], "")
    return {path: str(kind) for path, kind in zip(paths, kinds, strict=True) if kind}
