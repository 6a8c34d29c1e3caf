# SPDX-License-Identifier: Apache-2.0
"""Operations that were evaluated one by one, and what is said of them.

Frameworks that evaluate a program this way fill it in. Imports the core only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lossscale.core.explanation.findings import Finding
from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin
from lossscale.core.headroom import LARGEST

LARGEST_OF = LARGEST | {"float8_e5m2": 57344.0, "float8_e4m3fn": 448.0}
"""The largest number of each format, by the frameworks' names."""


class Location(NamedTuple):
    """Where an operation is in the user's program."""

    module: str | None = None
    """The name of the layer, such as "MLP/up"."""
    module_type: str | None = None
    line: str | None = None
    """The line of the user's code, such as "model.py:12"."""


@dataclass(eq=False)
class Node:
    """One operation that was evaluated, or an argument."""

    index: int
    """Its position in the order of evaluation."""
    location: Location
    operation: str | None = None
    parents: "tuple[Node, ...]" = ()
    """What made its inputs."""
    bad_parents: "tuple[Node, ...]" = ()
    """What made those of its inputs that were not finite."""
    kind: Kind | None = None
    """What its result has that is not finite."""
    dtype: str | None = None
    origin: Origin | None = None
    """What the operation did, where the result is worse than what it read."""
    magnitude: float | None = None
    lost_epsilon: float | None = None
    """A number that was added to its result, or to what that is made of, and that is 0
    in the format; 0 if it is not known which."""
    argument: str | None = None
    """The name of the argument, if it is one."""
    is_parameter: bool = False
    forward: bool = False
    """Whether the loss depends on it."""


def mark_forward(loss: Node | None) -> None:
    """Mark all that the loss depends on."""
    waiting = [] if loss is None else [loss]
    while waiting:
        node = waiting.pop()
        if not node.forward:
            node.forward = True
            waiting += [parent for parent in node.parents if not parent.forward]


def make_finding(
    node: Node | None, loss: Node | None, gradients: Mapping[str, Node]
) -> Finding | None:
    """Return what is said of a node.

    Args:
        node: The node; it is not finite.
        loss: The node of the loss.
        gradients: Those of the gradients, by the names of their parameters.
    """
    if node is None or node.kind is None or node.origin is None:
        return None
    name = next((name for name, one in gradients.items() if one is node), None)
    values: dict[str, Any] = {
        "origin": node.origin,
        "is_nan": node.kind.nan,
        "dtype": node.dtype,
        "tensor": node.argument if name is None else name,
    }
    if node.argument is not None:
        given: Any = "parameter" if node.is_parameter else "batch"
        return Finding(direction="given", role=given, **values)
    values |= {
        "module": node.location.module,
        "module_type": node.location.module_type,
        "line": node.location.line,
        "operation": node.operation,
        "magnitude": node.magnitude,
        "largest": LARGEST_OF.get(node.dtype or ""),
        "lost_epsilon": node.lost_epsilon,
    }
    if node.forward:
        role: Any = "loss" if loss is node else "intermediate"
        return Finding(direction="forward", role=role, **values)
    role = "intermediate gradient" if name is None else "parameter gradient"
    return Finding(direction="backward", role=role, **values)


def has_modules(nodes: Iterable[Node]) -> bool:
    """Whether operations were in named modules: a plain function has none."""
    return any(node.location.module is not None for node in nodes)


def find_bracket(gradients: Mapping[str, Node]) -> tuple[str | None, str | None]:
    """Return the last finite gradient and the first that was not, in their order."""
    last = None
    for name, node in sorted(gradients.items(), key=lambda item: item[1].index):
        if node.kind is not None:
            return last, name
        last = name
    return None, None
