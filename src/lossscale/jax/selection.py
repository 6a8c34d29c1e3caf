# SPDX-License-Identifier: Apache-2.0
"""Selection between two trees of the same structure, leaf by leaf.

No infinity and no NaN is written: such a number keeps its old value. Gradients that can
be squared can still add up to infinity over many steps (Adagrad), or exceed float16
(moments in float16). A check of the whole new state before it is written would need a
second pass over it; this comparison is part of the selection.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.state import Array
from lossscale.core.validation import format_value
from lossscale.errors import StructureError
from lossscale.jax.types import KeyPath, PyTree


def select_leaves(
    use_new: Array, new: PyTree, old: PyTree, *, finite_only: bool = True
) -> PyTree:
    """Return the leaves of `new` or `old` by a flag.

    Args:
        use_new: A boolean scalar.
        new: A pytree.
        old: A pytree of the same structure.
        finite_only: Whether infinities and NaN of `new` are replaced by `old`.
    """

    def select_leaf(path: KeyPath, new_leaf: Any, old_leaf: Any) -> Any:
        return _select_leaf(path, use_new, new_leaf, old_leaf, finite_only=finite_only)

    return jax.tree_util.tree_map_with_path(select_leaf, new, old)


def keep_finite(new: PyTree, old: PyTree) -> PyTree:
    """Return `new` with the old number in place of every infinity and NaN.

    Leaves that are no arrays, or whose dtype or shape differs, are those of `new`.
    """

    def replace_nonfinite(new_leaf: Any, old_leaf: Any) -> Any:
        are_arrays = _is_array(new_leaf) and _is_array(old_leaf)
        if (
            new_leaf is old_leaf
            or not are_arrays
            or _get_array_type(new_leaf) != _get_array_type(old_leaf)
        ):
            return new_leaf
        return jnp.where(_is_finite(new_leaf), new_leaf, old_leaf)

    return jax.tree.map(replace_nonfinite, new, old)


def has_same_structure(new: PyTree, old: PyTree) -> bool:
    """Whether two trees have the same containers, keys and static parts."""
    new_structure: object = jax.tree.structure(new)
    return new_structure == jax.tree.structure(old)


def list_paths(tree: PyTree) -> list[str]:
    """Return the key path of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def check_same_structure(new: PyTree, old: PyTree) -> None:
    """Raise a `StructureError` that names the leaves in which two trees differ."""
    if has_same_structure(new, old):
        return
    new_paths, old_paths = list_paths(new), list_paths(old)
    only_new = [path for path in new_paths if path not in old_paths]
    only_old = [path for path in old_paths if path not in new_paths]
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


def check_array_types(new: PyTree, old: PyTree) -> None:
    """Raise if two arrays at one place differ in dtype or shape."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    if all(
        new_leaf is old_leaf or _is_alike(new_leaf, old_leaf)
        for new_leaf, old_leaf in pairs
    ):
        return

    def check(path: KeyPath, new_leaf: Any, old_leaf: Any) -> None:
        if _is_array(new_leaf) and _is_array(old_leaf):
            _check_array_type(path, new_leaf, old_leaf)

    jax.tree_util.tree_map_with_path(check, new, old)


def _is_alike(new: Any, old: Any) -> bool:
    """Whether two leaves have the same dtype and shape, compared without JAX."""
    try:
        alike: bool = new.dtype == old.dtype and new.shape == old.shape
    except AttributeError:  # a number, or no array at all
        return False
    return alike


def check_distinct_arrays(new: PyTree, old: PyTree) -> None:
    """Raise if both trees contain the same array objects."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    arrays = [
        (new_leaf, old_leaf) for new_leaf, old_leaf in pairs if _is_array(new_leaf)
    ]
    if not arrays or any(new_leaf is not old_leaf for new_leaf, old_leaf in arrays):
        return
    message = (
        "The new and the old tree contain the very same arrays: there is nothing to "
        "select. Two calls of nnx.state(model) refer to the same variables: call "
        "nnx.as_pure(nnx.state(model)) before and after the step."
    )
    raise StructureError(message)


def _select_leaf(
    path: KeyPath, use_new: Array, new: Any, old: Any, *, finite_only: bool
) -> Any:
    """Return one of two leaves; NaN in the other does not matter."""
    if new is old:
        return new
    if not _is_array(new) or not _is_array(old):
        if type(new) is type(old) and new == old:
            return new
        location = jax.tree_util.keystr(path) or "the top"
        message = (
            f"The two leaves at {location} are {format_value(new)} and "
            f"{format_value(old)}. Under jit only arrays can be selected: convert the "
            "leaves to arrays, or remove them from both trees."
        )
        raise StructureError(message)
    if _check_array_type(path, new, old).dtype == jax.dtypes.float0:
        return new  # it holds no data
    if finite_only:
        use_new = use_new & _is_finite(new)
    return jnp.where(use_new, new, old)


def _check_array_type(path: KeyPath, new: Any, old: Any) -> "_ArrayType":
    """Return the dtype and shape that two arrays have in common, or raise."""
    new_type, old_type = _get_array_type(new), _get_array_type(old)
    if new_type != old_type:
        location = jax.tree_util.keystr(path) or "the top"
        message = f"The two leaves at {location} differ: {new_type} and {old_type}."
        raise StructureError(message)
    return new_type


class _ArrayType(NamedTuple):
    """The dtype and shape of an array or a number."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def _get_array_type(leaf: Any) -> _ArrayType:
    return _ArrayType(jnp.result_type(leaf), jnp.shape(leaf))


def _is_finite(array: Any) -> Array:
    """Return which numbers are finite; numbers other than floats are."""
    is_inexact = jnp.issubdtype(jnp.result_type(array), jnp.inexact)
    return jnp.isfinite(array) if is_inexact else True


def _is_array(leaf: object) -> bool:
    """Whether a leaf is an array, or a number that JAX converts to one."""
    return isinstance(
        leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    )
