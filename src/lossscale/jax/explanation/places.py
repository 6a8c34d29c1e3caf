# SPDX-License-Identifier: Apache-2.0
"""The layer and the line of an equation, from what JAX keeps of its source.

The layer is the path of `jax.named_scope`s around the equation. flax's linen modules
make one for each module, equinox's layers one with their class; nnx makes none, and is
known by its class and line.
"""

import re
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where an equation is in the user's program."""

    module: str | None = None
    """The path of named scopes, such as "MLP/up"."""
    module_type: str | None = None
    line: str | None = None
    """The line of the user's code, such as "model.py:12"."""


def find_place(source_info: Any, outer: Place) -> Place:
    """Return where an equation is.

    Args:
        source_info: What JAX keeps of its source.
        outer: Where the equation is that contains it.
    """
    path = _read_scopes(str(source_info.name_stack))
    module = "/".join(filter(None, (outer.module, path))) or None
    frames = _list_frames(source_info.traceback)
    own = next((f for f in frames if not _is_library(f.file_name)), None)
    line = outer.line if own is None else f"{Path(own.file_name).name}:{own.line_num}"
    calls = [f.function_name for f in frames if f.function_name.endswith(".__call__")]
    kind = calls[0].split(".")[-2] if calls else outer.module_type
    return Place(module, kind, line)


def _read_scopes(stack: str) -> str:
    """Return the named scopes of a name stack, without JAX's transformations.

    `transpose(jvp(MLP))/up` is `MLP/up`; `jvp()` is nothing.
    """
    while True:
        shorter = _TRANSFORMATION.sub(r"\1", stack)
        if shorter == stack:
            break
        stack = shorter
    parts = [part for part in stack.split("/") if part]
    return "/".join(part for part in parts if part not in _STRUCTURE)


_TRANSFORMATION = re.compile(
    r"(?<![\w.])(?:jvp|transpose|vmap|jit|pjit|linearize|remat|custom_jvp|custom_vjp"
    r"|rematted_computation|checkpoint)\(([^()]*)\)"
)
_STRUCTURE = frozenset(
    {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation"}
)
"""Scopes that JAX makes by itself."""


def _list_frames(traceback: Any) -> list[Any]:
    return list(getattr(traceback, "frames", None) or ())


def _is_library(name: str) -> bool:
    """Whether a file is of an installed package, of Python or of lossscale."""
    return name.startswith(_LIBRARIES) or name.startswith("<")


_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[2]),
    }
)
