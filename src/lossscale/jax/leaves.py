# SPDX-License-Identifier: Apache-2.0
"""One gradient of any kind that JAX has, and which leaves are none.

A gradient is a floating-point or complex array. What is narrower than float32 is
widened before anything is done to it. A complex number counts as its two parts.

Three kinds of leaves are no gradients and pass through untouched: `None`, which is no
leaf to JAX; `float0`, which `jax.grad(..., allow_int=True)` returns for integers and
keys; and state that is overwritten with its "gradient", as float8 layers keep it (see
`overwritten`). Anything else is a `GradientError` that names the place.

Whether a number is finite is asked of every number. A maximum of magnitudes will not
do: on some processors XLA's maximum loses a NaN.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.headroom import largest_addend
from lossscale.core.state import Array
from lossscale.core.validation import format_value
from lossscale.errors import GradientError

KeyPath: TypeAlias = tuple[Any, ...]
"""Where a leaf is, as `jax.tree_util.tree_flatten_with_path` says it."""

AsIs: TypeAlias = Callable[[KeyPath, Any], bool]
"""Says of a path and a leaf whether the leaf is left as it is."""

_OVERWRITTEN = "_overwrite_with_gradient"


def overwritten(path: KeyPath, leaf: Any) -> bool:
    """Whether a leaf belongs to state that is overwritten with its "gradient".

    Float8 layers return their next amax history and scales in place of a gradient.
    flax keeps them in a collection of the name `_overwrite_with_gradient`, which is
    what this function looks for on the path.

    Example:
        >>> import jax, lossscale.jax as ls
        >>> tree = {"_overwrite_with_gradient": {"scale": 1.0}, "params": {"w": 2.0}}
        >>> found = jax.tree_util.tree_leaves_with_path(tree)
        >>> [ls.overwritten(path, leaf) for path, leaf in found]
        [True, False]
    """
    del leaf
    return any(
        _OVERWRITTEN in (getattr(entry, "key", None), getattr(entry, "name", None))
        for entry in path
    )


def gradient_leaves(grads: Any, as_is: AsIs) -> list[tuple[str, Array]]:
    """Return every gradient with its path, and nothing that passes through."""
    return [
        (jax.tree_util.keystr(path), checked("gradient", path, leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if not passes(path, leaf, as_is)
    ]


def map_gradients(
    function: Callable[[Array], Array], grads: Any, as_is: AsIs
) -> tuple[Any, list[Array]]:
    """Return gradients with `function` applied, and the results in a list as well."""
    results = []

    def apply(path: KeyPath, leaf: Any) -> Any:
        if passes(path, leaf, as_is):
            return leaf
        results.append(function(checked("gradient", path, leaf)))
        return results[-1]

    return jax.tree_util.tree_map_with_path(apply, grads), results


def passes(path: KeyPath, leaf: Any, as_is: AsIs) -> bool:
    """Whether a leaf is no gradient, and is left as it is."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0 or as_is(path, leaf)


def checked(what: str, path: KeyPath, leaf: Any) -> Array:
    """Return a leaf as an array if it is floating-point or complex, or raise."""
    if isinstance(leaf, (float, complex)):
        return jnp.asarray(leaf)
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(leaf)
    place = jax.tree_util.keystr(path)
    message = (
        f"The {what}{' at ' + place if place else ''} is "
        f"{type(leaf).__name__ if dtype is None else dtype}, expected a floating-point "
        "array. Leave out what is not differentiated, or put None in its place."
    )
    raise GradientError(message)


def widened(leaf: Array) -> Array:
    """Return an array in float32 if it is narrower, else as it is."""
    if jnp.iscomplexobj(leaf):
        return leaf
    return leaf.astype(jnp.float32) if leaf.dtype.itemsize < _WIDE else leaf


_WIDE = 4
"""Bytes of float32."""


def multiplied(leaf: Array, factor: Array) -> Array:
    """Return a widened array times a real factor, in the dtype of the array."""
    if jnp.iscomplexobj(leaf):
        # The factor would become factor + 0j, and infinity times 0 is NaN.
        real, imaginary = (multiplied(part, factor) for part in parts(leaf))
        return jax.lax.complex(real, imaginary)
    return leaf * factor.astype(leaf.dtype)


def real_dtype(leaf: Array) -> Any:
    """Return the dtype of an array, or of the parts of a complex one."""
    return jnp.finfo(leaf.dtype).dtype


def parts(leaf: Array) -> list[Array]:
    """Return the real arrays that an array consists of."""
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def bits(leaf: Array) -> Array:
    """Return the magnitudes of a real array as integers of the same order."""
    size = 8 * leaf.dtype.itemsize
    raw = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"int{size}"))
    return raw & (2 ** (size - 1) - 1)


def is_finite(leaf: Array, addends: int = 1) -> Array:
    """Return whether no number of an array is NaN or infinite.

    With `addends`, also whether so many numbers of that size can be added up.
    """
    if addends == 1:
        return together([jnp.all(jnp.isfinite(part)) for part in parts(leaf)])
    found = parts(leaf)
    bound = largest_addend(found[0].dtype.name, addends)
    # NaN fails the comparison.
    return together([jnp.all(jnp.abs(part) <= bound) for part in found])


def together(flags: list[Array]) -> Array:
    """Return whether all flags are set; without any that is True."""
    return jnp.all(jnp.stack(flags)) if flags else jnp.asarray(True)


def flags(finite: Any) -> Array:
    """Return flags as a boolean array; what has no meaning as a flag is an error.

    A step that is taken for finite by mistake is applied, so nothing is guessed: NaN,
    None, text and a whole `Signal` have a truth value in Python, and no meaning here. A
    traced flag of NaN or infinity counts as not finite.
    """
    known = isinstance(finite, (bool, int, float, np.bool_, np.number, np.ndarray))
    if (
        not (known or isinstance(finite, jax.Array))
        or getattr(jnp.result_type(finite), "kind", "") not in tuple("biuf")
        or (known and np.isnan(finite).any())
    ):
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    array = jnp.asarray(finite)
    if array.dtype == jnp.bool_:
        return array
    return (array != 0) & jnp.isfinite(array)


def flag(finite: Any) -> Array:
    """Return one flag as a boolean array of no dimension; else raise."""
    found = flags(finite)
    if found.size != 1:
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    return found.reshape(())
