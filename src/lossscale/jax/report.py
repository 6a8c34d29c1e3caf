# SPDX-License-Identifier: Apache-2.0
"""Report which leaves were not finite, from flags computed in the pass of the check.

`leaf_flags` runs inside `jit` and returns three rows of booleans; `nonfinite_leaves`
runs outside and adds the key paths. The host knows the paths, so only the rows are
copied from the device, and only when `nonfinite_leaves` is called.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.validation import format_value
from lossscale.errors import GradientError, StructureError
from lossscale.jax import gradient
from lossscale.jax.consensus import has_axis
from lossscale.jax.gradient import is_overwrite_with_gradient
from lossscale.jax.types import AxisName, LeafPredicate, PyTree


class LeafFlags(NamedTuple):
    """The check of each gradient: rows of booleans, in the order of the tree.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> flags = ls.leaf_flags([jnp.array([1.0, jnp.inf]), jnp.array([jnp.nan])])
        >>> flags.finite.tolist(), flags.nan.tolist()
        ([False, False], [False, True])
    """

    finite: jax.Array
    """Whether all numbers of a gradient are finite."""
    nan: jax.Array
    """Whether any of them is NaN."""
    too_large: jax.Array
    """Whether all of them are finite and the square of one is not."""


def leaf_flags(
    grads: PyTree,
    *,
    axis_name: AxisName = None,
    passthrough: LeafPredicate = is_overwrite_with_gradient,
) -> LeafFlags:
    """Return flags for every gradient; under `jit`, without another read of them.

    Args:
        grads: The gradients that `unscale` or `value_and_grad` returned.
        axis_name: The mapped axes whose devices are combined; see `unscale`.
        passthrough: Which leaves are no gradients; see `unscale`.

    Raises:
        GradientError: If a gradient is not floating-point.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> grads = {"kernel": jnp.array([jnp.nan]), "bias": jnp.array([1.0])}
        >>> ls.nonfinite_leaves(grads, ls.leaf_flags(grads))
        {"['kernel']": 'nan'}
    """
    arrays = [leaf for _, leaf in gradient.list_gradients(grads, passthrough)]
    if not arrays:
        empty = jnp.zeros((0,), jnp.bool_)
        return LeafFlags(empty, empty, empty)
    results = [gradient.check_gradients([gradient.upcast(leaf)]) for leaf in arrays]
    finite, squarable = (jnp.stack(row) for row in zip(*results, strict=True))
    nan = jnp.stack([jnp.any(jnp.isnan(leaf)) for leaf in arrays])
    if not has_axis(axis_name):
        return LeafFlags(finite, nan, finite & ~squarable)
    severity = sum(flags.astype(jnp.int32) for flags in (~squarable, ~finite, nan))
    severity = jax.lax.pmax(severity, axis_name)
    return LeafFlags(severity < _INFINITE, severity == _NAN, severity == _TOO_LARGE)


_TOO_LARGE, _INFINITE, _NAN = 1, 2, 3
"""The severities of a gradient, in ascending order."""


def nonfinite_leaves(
    tree: PyTree,
    flags: LeafFlags,
    *,
    passthrough: LeafPredicate = is_overwrite_with_gradient,
) -> dict[str, str]:
    """Return the key paths of the gradients that caused a step to be skipped.

    Each path is mapped to "inf", "nan" or "too large". A gradient that contains several
    is a "nan" rather than an "inf", and an "inf" rather than "too large". This waits
    for the device.

    Args:
        tree: The gradients, or any tree of their structure; its values are not read.
        flags: What `leaf_flags` returned for them.
        passthrough: The same function that was passed to `leaf_flags`.

    Raises:
        GradientError: If `flags` are not those of `leaf_flags`.
        StructureError: If there are more or fewer gradients than flags.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> grads = {"kernel": jnp.array([-jnp.inf]), "bias": jnp.array([1.0])}
        >>> ls.nonfinite_leaves(grads, ls.leaf_flags(grads))
        {"['kernel']": 'inf'}
    """
    paths = [path for path, _ in gradient.list_gradients(tree, passthrough)]
    if not isinstance(flags, (tuple, list)) or len(flags) != len(LeafFlags._fields):
        message = (
            "flags must be what leaf_flags(grads) returned, as in "
            f"nonfinite_leaves(grads, leaf_flags(grads)), got {format_value(flags)}."
        )
        raise GradientError(message)
    finite, nan, too_large = (np.asarray(row) for row in flags)
    if finite.shape != (len(paths),):
        message = (
            f"The flags have shape {finite.shape} and the tree has {len(paths)} "
            f"gradients: {format_value(paths)}. Pass the tree that leaf_flags was "
            "called with."
        )
        raise StructureError(message)
    kinds = np.select([nan, ~finite, too_large], ["nan", "inf", "too large"], "")
    return {path: str(kind) for path, kind in zip(paths, kinds, strict=True) if kind}
