# SPDX-License-Identifier: Apache-2.0
"""Equations that contain jaxprs: jit, scan, while, cond, checkpoint, custom rules.

Loops are evaluated iteration by iteration. `shard_map`, kernels and callbacks are not
entered: each of them is one operation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from lossscale.core.explanation.evaluated import Location
from lossscale.jax.explanation.values import Value, kind_of

_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_OPAQUE = frozenset({"shard_map", "pallas_call", "xla_pmap", "run_state", "for"})


def find_inner(eqn: Any) -> Any | None:
    """Return the closed jaxpr that an equation calls with its inputs; or `None`."""
    if eqn.primitive.name in _OPAQUE:
        return None
    for name in _INNER:
        inner = eqn.params.get(name)
        if isinstance(inner, jex_core.Jaxpr):
            inner = jex_core.ClosedJaxpr(inner, ())
        if not isinstance(inner, jex_core.ClosedJaxpr) or len(inner.consts) != len(
            inner.jaxpr.constvars
        ):
            continue
        counts = len(inner.jaxpr.invars), len(inner.jaxpr.outvars)
        if counts == (len(eqn.invars), len(eqn.outvars)):
            return inner
    return None


def _run_scan(
    evaluation: Any, eqn: Any, inputs: list[Value], location: Location
) -> list[Value]:
    params = eqn.params
    length, body = params["length"], params["jaxpr"]
    split = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry = inputs[: split[0]], inputs[split[0] : split[1]]
    rows = inputs[split[1] :]
    order = range(length - 1, -1, -1) if params["reverse"] else range(length)
    collected: dict[int, list[Value]] = {}
    for index in order:
        taken = [_take_row(value, index) for value in rows]
        results = evaluation.run_closed(body, [*consts, *carry, *taken], location)
        carry = results[: params["num_carry"]]
        collected[index] = results[params["num_carry"] :]
    stacked = [
        _stack(
            evaluation, [collected[index][column] for index in range(length)], location
        )
        if length
        else _make_empty(evaluation, variable, location)
        for column, variable in enumerate(eqn.outvars[params["num_carry"] :])
    ]
    return [*carry, *stacked]


def _take_row(value: Value, index: int) -> Value:
    row = jax.lax.index_in_dim(value.array, index, keepdims=False)
    return Value(row, value.node, kind_of(row) if value.kind is not None else None)


def _stack(evaluation: Any, values: Sequence[Value], location: Location) -> Value:
    node = evaluation.add_node(location, "scan", values)
    array = jnp.stack([value.array for value in values])
    node.kind = kind_of(array)
    return Value(array, node, node.kind)


def _make_empty(evaluation: Any, variable: Any, location: Location) -> Value:
    array = jnp.zeros(variable.aval.shape, variable.aval.dtype)
    return Value(array, evaluation.add_node(location, "scan", ()))


def _run_while(
    evaluation: Any, eqn: Any, inputs: list[Value], location: Location
) -> list[Value]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_condition = inputs[:first]
    of_body = inputs[first : first + second]
    carry = inputs[first + second :]
    while True:
        (going_on,) = evaluation.run_closed(
            params["cond_jaxpr"], [*of_condition, *carry], location
        )
        if not bool(going_on.array):
            return carry
        carry = evaluation.run_closed(
            params["body_jaxpr"], [*of_body, *carry], location
        )


def _run_cond(
    evaluation: Any, eqn: Any, inputs: list[Value], location: Location
) -> list[Value]:
    branches = eqn.params["branches"]
    chosen = min(max(int(inputs[0].array), 0), len(branches) - 1)
    results: list[Value] = evaluation.run_closed(branches[chosen], inputs[1:], location)
    return results


CONTROL: dict[str, Callable[[Any, Any, list[Value], Location], list[Value]]] = {
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
}
