# SPDX-License-Identifier: Apache-2.0
"""One gradient: its dtype, its bits, its check; and the leaves that are no gradients.

A gradient is a floating-point or complex array. Gradients narrower than float32 are
upcast to float32 first. A complex number counts as its real and imaginary part.

Three kinds of leaves are no gradients and pass through unchanged: `None`, which JAX
does not treat as a leaf; `float0`, which `jax.grad(..., allow_int=True)` returns for
integers and keys; and state that flax overwrites with its "gradient", such as that of
float8 layers (see `is_overwrite_with_gradient`). Any other leaf is a `GradientError`
that names its path.

The check tests every number. A maximum of magnitudes is not enough: on some processors
XLA's maximum drops NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.headroom import largest_square
from lossscale.errors import GradientError
from lossscale.jax.types import KeyPath, LeafPredicate, PyTree

_OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
_FLOAT32_BYTES = 4


def is_overwrite_with_gradient(path: KeyPath, leaf: object) -> bool:
    """Whether a leaf belongs to state that is overwritten with its "gradient".

    Float8 layers return their next amax history and scales in place of a gradient.
    flax stores them in a collection named `_overwrite_with_gradient`, and this function
    searches the path for that name.

    Example:
        >>> import jax, lossscale.jax as ls
        >>> tree = {"_overwrite_with_gradient": {"scale": 1.0}, "params": {"w": 2.0}}
        >>> leaves = jax.tree_util.tree_leaves_with_path(tree)
        >>> [ls.is_overwrite_with_gradient(path, leaf) for path, leaf in leaves]
        [True, False]
    """
    del leaf
    return any(
        _OVERWRITE_WITH_GRADIENT
        in (getattr(entry, "key", None), getattr(entry, "name", None))
        for entry in path
    )


def is_differentiable(leaf: object) -> bool:
    """Whether JAX differentiates with respect to a leaf."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def list_gradients(
    grads: PyTree, passthrough: LeafPredicate
) -> list[tuple[str, jax.Array]]:
    """Return every gradient of a tree with its path; other leaves are left out."""
    return [
        (jax.tree_util.keystr(path), validate_leaf("gradient", path, leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if not is_passthrough(path, leaf, passthrough)
    ]


def map_gradients(
    function: Callable[[jax.Array], jax.Array],
    grads: PyTree,
    passthrough: LeafPredicate,
) -> tuple[PyTree, list[jax.Array]]:
    """Apply a function to every gradient; return the tree and a list of the results."""
    results: list[jax.Array] = []

    def apply(path: KeyPath, leaf: Any) -> Any:
        if is_passthrough(path, leaf, passthrough):
            return leaf
        results.append(function(validate_leaf("gradient", path, leaf)))
        return results[-1]

    return jax.tree_util.tree_map_with_path(apply, grads), results


def is_passthrough(path: KeyPath, leaf: object, passthrough: LeafPredicate) -> bool:
    """Whether a leaf is no gradient and stays unchanged."""
    is_float0 = getattr(leaf, "dtype", None) == jax.dtypes.float0
    return is_float0 or passthrough(path, leaf)


def validate_leaf(kind: str, path: KeyPath, leaf: Any) -> jax.Array:
    """Return a leaf as an array if it is floating-point or complex, or raise."""
    if isinstance(leaf, (float, complex)):
        return jnp.asarray(leaf)
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(leaf)
    location = jax.tree_util.keystr(path)
    message = (
        f"The {kind}{' at ' + location if location else ''} is "
        f"{type(leaf).__name__ if dtype is None else dtype}, expected a floating-point "
        "array. Remove the leaves that are not differentiated, or replace them with "
        "None."
    )
    raise GradientError(message)


def upcast(leaf: jax.Array) -> jax.Array:
    """Return an array in float32 if its dtype is narrower, else unchanged."""
    if jnp.iscomplexobj(leaf):
        return leaf
    is_narrow = leaf.dtype.itemsize < _FLOAT32_BYTES
    return leaf.astype(jnp.float32) if is_narrow else leaf


def multiply(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    """Return an upcast array times a real factor, in the dtype of the array."""
    if jnp.iscomplexobj(leaf):
        # The factor would become factor + 0j, and infinity times 0 is NaN.
        real, imaginary = (multiply(part, factor) for part in split_complex(leaf))
        return jax.lax.complex(real, imaginary)
    return leaf * factor.astype(leaf.dtype)


def get_real_dtype(leaf: jax.Array) -> np.dtype[Any]:
    """Return the dtype of an array, or of the parts of a complex array."""
    dtype: np.dtype[Any] = jnp.finfo(leaf.dtype).dtype
    return dtype


def split_complex(leaf: jax.Array) -> list[jax.Array]:
    """Return the real and imaginary part of a complex array, or a real array alone."""
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def get_magnitude_bits(leaf: jax.Array) -> jax.Array:
    """Return the magnitudes of a real array as integers of the same order."""
    size = 8 * leaf.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"int{size}"))
    magnitudes: jax.Array = bits & (2 ** (size - 1) - 1)
    return magnitudes


class GradientCheck(NamedTuple):
    """The result of a check of gradients, one boolean per field."""

    finite: jax.Array
    """Whether no number is NaN or infinite."""
    squarable: jax.Array
    """Whether, in addition, the square of every number is finite."""


def check_gradients(arrays: list[jax.Array], divisor: int = 1) -> GradientCheck:
    """Check in one pass whether all numbers are finite and can be squared.

    Args:
        arrays: Unscaled gradients.
        divisor: Divides the largest number that counts as squarable.
    """
    results = [
        _check_part(part, divisor) for leaf in arrays for part in split_complex(leaf)
    ]
    finite, squarable = zip(*results, strict=True) if results else ((), ())
    return GradientCheck(all_true(list(finite)), all_true(list(squarable)))


def _check_part(part: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Check one real array."""
    bound = largest_square(part.dtype.name) / divisor
    # NaN fails the comparison. One reduction of both flags: XLA does not merge two, and
    # would read the gradient twice.
    flags = jnp.isfinite(part), jnp.abs(part) <= bound
    finite, squarable = jax.lax.reduce(
        flags, (np.True_, np.True_), _and_pairs, tuple(range(part.ndim))
    )
    return finite, squarable


def _and_pairs(first: Any, second: Any) -> tuple[jax.Array, jax.Array]:
    """Combine two pairs of flags; a named function, so that JAX caches its program."""
    return first[0] & second[0], first[1] & second[1]


def all_true(flags: list[jax.Array]) -> jax.Array:
    """Return whether all flags are true; an empty list is.

    The flags are counted. XLA turns `jnp.all(jnp.stack(flags))` into a chain of scalars
    and repeats it in every operation that selects by the result: the program would grow
    with the square of the number of leaves.
    """
    if not flags:
        return jnp.asarray(True)
    return jnp.sum(jnp.stack(flags), dtype=jnp.int32) == len(flags)
