# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow lends to the classic classes: variables, graphs and replicas.

Eagerly everything happens at once. In a graph, a TF1 graph as well as one that
`tf.function` traces, every change is an op, and one that must come after another
waits for it by a control dependency. What a caller gets there is a boolean tensor: it
can be evaluated, grouped, depended on, passed on and returned from a `tf.function`,
where an op can not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from lossscale.core import classic, trees
from lossscale.core.policies import Policy
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.errors import ContextError
from lossscale.tensorflow import leaves, replicas, verbs


class _Cell:
    """A state kept in `tf.Variable`s, which belong to the graph they were made in."""

    def __init__(self, owner: str, variables: list[Any]) -> None:
        self._owner = owner
        self.variables = variables
        self._graph = _graph()

    def read(self) -> ScaleState:
        """Return the current values as tensors; no `bad` variable reads as 0."""
        self._check_graph()
        values = [tf.convert_to_tensor(variable) for variable in self.variables]
        missing = [tf.constant(0, tf.int32)] * (len(ScaleState._fields) - len(values))
        return ScaleState(*values, *missing)

    def read_for_repr(self) -> ScaleState | None:
        """Return the current values for `repr`; in a graph they cannot be read."""
        if self._graph is not None or not tf.executing_eagerly():
            return None
        return ScaleState(*(value.numpy().item() for value in self.read()))

    def assign(self, state: ScaleState) -> Any:
        """Store new values; in a graph, return a tensor that does so when evaluated."""
        pairs = zip(self.variables, state, strict=False)
        assigned = [variable.assign(value) for variable, value in pairs]
        return None if tf.executing_eagerly() else _after(assigned, tf.constant(True))

    def _check_graph(self) -> None:
        if _graph() is self._graph:
            return
        made = "eagerly" if self._graph is None else "in another graph"
        message = (
            f"This {self._owner} was made {made}: its variables cannot be used here. "
            "Make it in the graph it is used in, inside the same `with "
            "graph.as_default()` (in an Estimator: inside model_fn)."
        )
        raise ContextError(message)


class _Binding:
    """The methods that the framework-free bodies call."""

    def cell(
        self,
        owner: Any,
        state: ScaleState,
        scale: classic.Variable,
        good: classic.Variable,
        bad: classic.Variable | None,
    ) -> _Cell:
        name = type(owner).__name__
        if not tf.executing_eagerly() and _graph() is None:
            message = (
                f"{name} cannot be made inside a tf.function: its variables must "
                "outlive the call. Make it outside, and use it inside."
            )
            raise ContextError(message)
        variables = []
        for kind, value in zip((scale, good, bad), state, strict=True):
            if kind is None:
                continue
            # TensorFlow 1's constructor: in its graphs the other lists every copy of a
            # mirrored variable for Savers, under one name.
            variable = tf.compat.v1.Variable(
                tf.constant(value, kind.dtype),
                trainable=False,
                name=kind.name,
                dtype=kind.dtype,
                use_resource=True,
            )
            # The attribute is what checkpoints find it by.
            setattr(owner, kind.name, variable)
            variables.append(variable)
        return _Cell(name, variables)

    def constant(self, value: float) -> Array:
        return tf.constant(value, tf.float32)

    def as_scale(self, value: Any) -> Array:
        number = tf.cast(tf.convert_to_tensor(value), tf.float32)
        return tf.ensure_shape(number, ())

    def check_context(self, method: str) -> None:
        replicas.check_cross_replica_context(method)

    def flag(self, finite: Any) -> Array:
        if isinstance(finite, tf.distribute.DistributedValues):
            return replicas.agreed(finite)
        return verbs.flag(finite)

    def all_finite(self, grads: Any) -> Array:
        return replicas.all_finite(grads)

    def update(self, policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
        return verbs.update(policy, state, signal)

    def nothing(self) -> Any:
        return None if tf.executing_eagerly() else tf.constant(True)

    def scale_loss(self, loss: Any, loss_scale: Array) -> Any:
        return verbs.scale(loss, ScaleState(loss_scale, 0, 0))

    def unscale(self, grads: list[Any], loss_scale: Array) -> list[Any]:
        # Whether they are finite is asked when they are applied.
        checked = trees.map_leaves(partial(leaves.checked, "gradient"), grads)
        return list(verbs.divided(checked, loss_scale))

    def across_replicas(self, function: Callable[..., Any], *lists: list[Any]) -> Any:
        return replicas.merge(function, *lists)

    def in_each_replica(self, function: Callable[..., Any], *lists: list[Any]) -> Any:
        return replicas.spread(function, *lists)

    def transaction(
        self,
        permitted: Array,
        apply: Callable[[], Any],
        skip: Callable[[], Any],
        is_finite: Callable[[], Array],
        update: Callable[[Array | None], Any],
    ) -> Any:
        if tf.executing_eagerly():
            applied = bool(permitted)
            (apply if applied else skip)()
            update(None if applied else is_finite())
            return None
        # Branches that return ops and not tensors: under XLA a step is a tenth faster.
        # So the flag has a branch of its own, and is computed on skipped steps alone.
        applied = tf.cond(
            permitted,
            lambda: _group(apply()),
            lambda: _group(skip()),
            name="apply_or_skip",
        )
        too_large = tf.cond(
            permitted, lambda: tf.constant(False), is_finite, name="too_large"
        )
        with tf.control_dependencies([applied]):
            return _after([applied, update(too_large)], permitted)

    def unless(self, condition: Array, ask: Callable[[], tuple[Any, Any]]) -> Array:
        if tf.executing_eagerly():
            return self.flag(False if bool(condition) else ask()[1])

        def asked() -> Array:
            operation, flag = ask()
            return _after(operation, self.flag(flag))

        return tf.cond(condition, lambda: tf.constant(False), asked, name="unless")


BINDING = _Binding()


def _graph() -> Any:
    """Return the graph that variables made here belong to; `None` is eager mode.

    Inside a `tf.function` that is the world around it.
    """
    with tf.init_scope():
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _after(results: Any, value: Array) -> Array:
    """Return a value that is known when everything in a nest has run."""
    with tf.control_dependencies(_runnable(results)):
        return tf.identity(value)


def _group(results: Any) -> Any:
    """Return one op that runs everything in a nest that can be run."""
    return tf.group(*_runnable(results))


def _runnable(results: Any) -> list[Any]:
    """Return the ops and tensors in a nest; optimizers return all kinds of things."""
    kinds = tf.Operation, tf.Tensor, tf.Variable
    # Under a strategy an assignment is one op for each copy of the variable.
    local = tf.distribute.get_strategy().experimental_local_results
    parts = [part for x in tf.nest.flatten(results) for part in local(x)]
    return [part for part in parts if isinstance(part, kinds)]
