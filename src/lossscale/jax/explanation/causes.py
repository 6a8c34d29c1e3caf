# SPDX-License-Identifier: Apache-2.0
"""From results that are not finite back to the first equation that left its format."""

from collections.abc import Iterable, Sequence
from typing import Any

from lossscale.core.explanation.findings import Finding
from lossscale.jax.explanation.magnitudes import LARGEST_OF
from lossscale.jax.explanation.values import Node, Value


def mark_forward(loss: Value) -> None:
    """Mark all that the loss depends on."""
    waiting = [] if loss.node is None else [loss.node]
    while waiting:
        node = waiting.pop()
        if not node.forward:
            node.forward = True
            waiting += [parent for parent in node.parents if not parent.forward]


def find_causes(results: Iterable[Value]) -> tuple[Node | None, Node | None]:
    """Return where results first left their format, and where a NaN was made of it.

    Only what reaches one of the results counts: the -inf of a mask that a softmax has
    turned into zeros is not seen.
    """
    nodes = _list_ancestors(results)
    makers = sorted((n for n in nodes if n.origin is not None), key=_index)
    makers_of_nan = [n for n in makers if n.kind is not None and n.kind.nan]
    faults = [node for node in makers if not _is_mask(node)] or makers
    first = faults[0] if faults else None
    if first is None:
        return None, None
    nan = next((n for n in makers_of_nan if n.index > first.index), None)
    is_nan = first.kind is not None and first.kind.nan
    return first, None if is_nan else nan


def _list_ancestors(results: Iterable[Value]) -> set[Node]:
    seen: set[Node] = set()
    waiting = [v.node for v in results if v.kind is not None and v.node is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.bad_parents
    return seen


def _index(node: Node) -> int:
    return node.index


def _is_mask(node: Node) -> bool:
    """Whether it is a constant of -inf, which masks have on purpose."""
    return node.origin == "constant" and node.kind is not None and node.kind.is_mask


def make_finding(
    node: Node, loss: Value, gradients: Sequence[tuple[str, Value]]
) -> Finding:
    """Return what is said of a node."""
    if node.kind is None or node.origin is None:
        message = "A finding needs a node that is not finite."
        raise AssertionError(message)
    name = next((n for n, value in gradients if value.node is node), None)
    values: dict[str, Any] = {
        "origin": node.origin,
        "is_nan": node.kind.nan,
        "dtype": node.dtype,
        "tensor": node.argument if name is None else name,
    }
    if node.argument is not None:
        role = "parameter" if node.is_parameter else "batch"
        return Finding(direction="given", role=role, **values)  # type: ignore[arg-type]
    values |= {
        "module": node.place.module,
        "module_type": node.place.module_type,
        "line": node.place.line,
        "operation": node.operation,
        "magnitude": node.magnitude,
        "largest": LARGEST_OF.get(node.dtype or ""),
    }
    if node.forward:
        role = "loss" if loss.node is node else "intermediate"
        return Finding(direction="forward", role=role, **values)  # type: ignore[arg-type]
    role = "intermediate gradient" if name is None else "parameter gradient"
    return Finding(direction="backward", role=role, **values)  # type: ignore[arg-type]
