# SPDX-License-Identifier: Apache-2.0
"""Nested structures of gradients, for adapters whose framework has no trees of its own.

A structure is any nesting of dict, list, tuple and NamedTuple. `None` is not a leaf: it
represents a gradient that does not exist and passes through. Nothing that was given
is changed; every result is a new structure of the same shape.
"""

from collections.abc import Callable, Iterator
from copy import copy
from operator import itemgetter
from typing import Any

from lossscale.errors import StructureError


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, such as `['dense'][0].kernel`."""
    children = _children(tree, path)
    if children is None:
        yield path, tree
        return
    for name, child in children:
        yield from leaves(child, name)


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """Return the same structure with `function(path, leaf)` in place of each leaf."""
    if tree is None:
        return None
    children = _children(tree, path)
    if children is None:
        return function(path, tree)
    results = [map_leaves(function, child, name) for name, child in children]
    if type(tree) is dict:
        # torch.compile stumbles over the copy below.
        return dict(zip(tree, results, strict=True))
    if isinstance(tree, dict):
        result = copy(tree)  # keeps the kind of dict, an OrderedDict or a defaultdict
        for key, value in zip(tree, results, strict=True):
            result[key] = value  # not update(): a Counter's adds
        return result
    if hasattr(tree, "_fields"):
        return type(tree)(*results)
    return type(tree)(results)


def check_same_structure(first: Any, second: Any, path: str = "") -> None:
    """Raise a `StructureError` that names the first path at which the two differ."""
    first_children, second_children = _children(first, path), _children(second, path)
    if first_children is None and second_children is None:
        return
    if isinstance(first, dict) and isinstance(second, dict):
        # Neither the order of the keys nor the kind of dict is part of the structure.
        first_children = sorted(first_children or [], key=itemgetter(0))
        second_children = sorted(second_children or [], key=itemgetter(0))
        alike = True
    else:
        alike = type(first) is type(second)
    if (
        first_children is None
        or second_children is None
        or not alike
        or [name for name, _ in first_children] != [name for name, _ in second_children]
    ):
        message = (
            f"The two structures differ at {path or 'the top'}: {_describe(first)} "
            f"against {_describe(second)}."
        )
        raise StructureError(message)
    for (name, first_child), (_, second_child) in zip(
        first_children, second_children, strict=True
    ):
        check_same_structure(first_child, second_child, name)


def _children(tree: Any, path: str) -> list[tuple[str, Any]] | None:
    """Return the children of a container with their paths; `None` for a leaf."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [(f"{path}[{key!r}]", child) for key, child in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names = (f"{path}.{name}" for name in tree._fields)
        return list(zip(names, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return [(f"{path}[{index}]", child) for index, child in enumerate(tree)]
    return None


def _describe(tree: Any) -> str:
    """Describe one node of a structure, in a few words."""
    if isinstance(tree, dict):
        return f"dict with keys {list(tree)}"
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__} of {len(tree)}"
    return type(tree).__name__
