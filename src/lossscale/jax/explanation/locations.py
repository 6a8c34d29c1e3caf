# SPDX-License-Identifier: Apache-2.0
"""The layer and the line of an equation, from what JAX keeps of its source.

The layer is the path of `jax.named_scope`s around the equation. flax's linen modules
make one for each module, equinox's layers one with their class; nnx makes none, and is
known by its class and line.
"""

import re
import sysconfig
from pathlib import Path
from typing import Any

import jax

from lossscale.core.explanation.evaluated import Location


def find_location(source_info: Any, outer: Location) -> Location:
    """Return where an equation is.

    Args:
        source_info: What JAX keeps of its source.
        outer: Where the equation is that contains it.
    """
    path = _read_scopes(str(source_info.name_stack))
    module = _join(outer.module, path)
    frames = _list_frames(source_info.traceback)
    frame = next((f for f in frames if not _is_library(f.file_name)), None)
    line = (
        outer.line
        if frame is None
        else f"{Path(frame.file_name).name}:{frame.line_num}"
    )
    kind = next(filter(None, map(_find_class, frames)), outer.module_type)
    # Without scopes the class is all that is known of the layer.
    return Location(module, kind, line) if module else Location(kind, None, line)


def _join(outer: str | None, path: str) -> str | None:
    """Return a path of scopes within that of the equation around it."""
    if outer is None or path == outer or path.startswith(f"{outer}/"):
        return path or None
    return f"{outer}/{path}" if path else outer


def _find_class(frame: Any) -> str | None:
    """Return the class whose `__call__` a frame is in; Python 3.10 does not know it."""
    if frame.file_name.startswith(_JAX):
        return None
    names = frame.function_name.split(".")
    is_call = len(names) > 1 and names[-1] == "__call__"
    return names[-2] if is_call and not names[-2].startswith("_") else None


def _read_scopes(stack: str) -> str:
    """Return the named scopes of a name stack, without JAX's transformations.

    `transpose(jvp(MLP))/up` is `MLP/up`; `jvp()` is nothing.
    """
    stack = _NAMED.sub("", stack)
    while True:
        shorter = _TRANSFORMATION.sub(r"\1", stack)
        if shorter == stack:
            break
        stack = shorter
    names = [name for name in stack.split("/") if name]
    return "/".join(name for name in names if name not in _STRUCTURE)


_NAMED = re.compile(r"(?<![\w.])(?:jit|pjit|remat|custom_jvp|custom_vjp)\([^()]*\)")
"""Scopes that have the name of a function, which is no layer."""
_TRANSFORMATION = re.compile(
    r"(?<![\w.])(?:jvp|transpose|vmap|linearize|checkpoint)\(([^()]*)\)"
)
_STRUCTURE = frozenset({"closed_call", "checkpoint", "rematted_computation"})
"""Scopes that JAX makes by itself."""


def _list_frames(traceback: Any) -> list[Any]:
    return list(getattr(traceback, "frames", None) or ())


def _is_library(name: str) -> bool:
    """Whether a file is of an installed package, of Python or of lossscale."""
    return name.startswith(_LIBRARIES) or name.startswith("<")


_JAX = str(Path(jax.__file__).parent)
_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[2]),
    }
)
