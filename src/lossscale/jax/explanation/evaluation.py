# SPDX-License-Identifier: Apache-2.0
"""`Evaluation`: evaluates a jaxpr equation by equation, and keeps what made what.

Each primitive runs by itself on the device, in its own format: a result that XLA would
keep in a wider one inside a fused program is rounded here.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from lossscale.core.explanation.evaluated import Location, Node
from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin
from lossscale.jax.explanation.control import CONTROL, find_inner
from lossscale.jax.explanation.locations import find_location
from lossscale.jax.explanation.magnitudes import measure_wide
from lossscale.jax.explanation.origins import (
    find_lost_epsilon,
    find_origin,
    find_origin_of_nan,
)
from lossscale.jax.explanation.values import Value, kind_of

_SILENT = frozenset({"debug_callback", "debug_print"})
"""Equations that are left out: they have no result, and were seen in training."""


class Evaluation:
    """Evaluates jaxprs; `nodes` has every equation in the order of evaluation."""

    def __init__(self) -> None:
        """Start with no equation."""
        self.nodes: list[Node] = []

    def add_argument(self, array: Any, name: str, *, is_parameter: bool) -> Value:
        """Return an argument as a value."""
        kind = kind_of(array)
        node = self.add_node(Location(), None, ())
        node.kind, node.argument, node.is_parameter = kind, name, is_parameter
        if kind is not None:
            node.origin = "parameter" if is_parameter else "batch"
        return Value(array, node, kind)

    def add_node(
        self, location: Location, operation: str | None, inputs: Sequence[Value]
    ) -> Node:
        """Return a new node that was made of some values."""
        parents = tuple(value.node for value in inputs if value.node is not None)
        bad = [v.node for v in inputs if v.kind is not None and v.node is not None]
        node = Node(len(self.nodes), location, operation, parents, tuple(bad))
        self.nodes.append(node)
        return node

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Value],
        inputs: Sequence[Value],
        outer: Location,
    ) -> list[Value]:
        """Return the results of a jaxpr."""
        known: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, jex_core.Literal):
                return Value(atom.val, None, kind_of(atom.val))
            return known[atom]

        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _SILENT:
                continue
            location = find_location(eqn.source_info, outer)
            results = self._run_equation(eqn, [read(v) for v in eqn.invars], location)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def run_closed(
        self, closed: Any, inputs: Sequence[Value], outer: Location
    ) -> list[Value]:
        """Return the results of a jaxpr with its constants."""
        consts = [Value(const, None, kind_of(const)) for const in closed.consts]
        return self.run(closed.jaxpr, consts, inputs, outer)

    def _run_equation(
        self, eqn: Any, inputs: list[Value], location: Location
    ) -> list[Value]:
        name = eqn.primitive.name
        if name in CONTROL:
            return CONTROL[name](self, eqn, inputs, location)
        inner = find_inner(eqn)
        if inner is not None:
            return self.run_closed(inner, inputs, location)
        arrays = [value.array for value in inputs]
        found = eqn.primitive.get_bind_params(eqn.params)
        # Before JAX 0.10, functions were not among the other parameters.
        functions, params = found if isinstance(found, tuple) else ((), found)
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*functions, *arrays, **params)
        listed = results if eqn.primitive.multiple_results else [results]
        return [self._keep(eqn, array, inputs, location) for array in listed]

    def _keep(
        self, eqn: Any, array: jax.Array, inputs: list[Value], location: Location
    ) -> Value:
        """Return a result as a value, with what the equation did to make it."""
        name = eqn.primitive.name
        node = self.add_node(location, name, inputs)
        node.kind = kind = kind_of(array)
        node.lost_epsilon = find_lost_epsilon(name, inputs, array)
        if kind is not None:
            node.dtype = str(array.dtype)
            node.origin, node.magnitude = _find_origin(eqn, inputs, kind)
        return Value(array, node, kind)


def _find_origin(
    eqn: Any, inputs: list[Value], kind: Kind
) -> tuple[Origin | None, float | None]:
    """Return what an equation did, if its result is worse than what it read."""
    given = [value.kind for value in inputs if value.kind is not None]
    name = eqn.primitive.name
    if not given:
        arrays = [value.array for value in inputs]
        wide = measure_wide(eqn, arrays)
        return find_origin(name, inputs, kind, wide=wide), wide
    if all(value.node is None for value in inputs if value.kind is not None):
        return "constant", None
    if kind.nan and not any(one.nan for one in given):
        return find_origin_of_nan(name, inputs), None
    return None, None
