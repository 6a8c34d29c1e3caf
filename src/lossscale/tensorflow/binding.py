# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow provides for the classic classes: variables, graphs and replicas.

Eagerly everything happens at once. In a graph, a TF1 graph as well as one that
`tf.function` traces, every change is an op, and an op that must come after another
waits for it by a control dependency. There a caller gets a boolean tensor, which can be
evaluated, grouped, depended on, passed on and returned from a `tf.function`; an op can
not.
"""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from lossscale.core import classic
from lossscale.core.state import Array, ScaleState
from lossscale.errors import ContextError
from lossscale.tensorflow import consensus, functional
from lossscale.tensorflow.gradient import unscale


class _StateVariables:
    """A state kept in `tf.Variable`s, which belong to the graph they were made in."""

    def __init__(self, owner: str, variables: list[Any]) -> None:
        self._owner = owner
        self.variables = variables
        self._graph = _graph()

    def read(self) -> ScaleState:
        """Return the current values as tensors; no `bad` variable reads as 0."""
        values = self.read_all()
        missing = [tf.constant(0, tf.int32)] * (len(ScaleState._fields) - len(values))
        return ScaleState(*values, *missing)

    def read_all(self) -> list[Array]:
        """Return the current value of every variable."""
        self._check_graph()
        return [tf.convert_to_tensor(variable) for variable in self.variables]

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
        origin = "eagerly" if self._graph is None else "in another graph"
        message = (
            f"This {self._owner} was made {origin}: its variables cannot be used here. "
            "Make it in the graph it is used in, inside the same `with "
            "graph.as_default()` (in an Estimator: inside model_fn)."
        )
        raise ContextError(message)


class _Binding:
    """The methods that the framework-free bodies call."""

    def create_variables(
        self,
        owner: Any,
        state: ScaleState,
        scale: classic.Variable,
        good: classic.Variable,
        bad: classic.Variable | None,
    ) -> _StateVariables:
        kinds = [kind for kind in (scale, good, bad) if kind is not None]
        values = [x for x, kind in zip(state, (scale, good, bad), strict=True) if kind]
        return self.create_variables_for(owner, values, kinds)

    def create_variables_for(
        self, owner: Any, values: Iterable[float], kinds: list[classic.Variable]
    ) -> _StateVariables:
        """Create variables of a class, owned (and checkpointed) by `owner`."""
        name = type(owner).__name__
        if not tf.executing_eagerly() and _graph() is None:
            message = (
                f"{name} cannot be made inside a tf.function: its variables must "
                "outlive the call. Make it outside, and use it inside."
            )
            raise ContextError(message)
        variables = []
        for kind, value in zip(kinds, values, strict=True):
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
        return _StateVariables(name, variables)

    def constant(self, value: float) -> Array:
        return tf.constant(value, tf.float32)

    def as_scale(self, value: Any) -> Array:
        number = tf.cast(tf.convert_to_tensor(value), tf.float32)
        return tf.ensure_shape(number, ())

    check_context = staticmethod(consensus.check_cross_replica_context)
    across_replicas = staticmethod(consensus.call_across_replicas)
    in_each_replica = staticmethod(consensus.call_in_each_replica)
    all_finite = staticmethod(consensus.all_finite)
    update = staticmethod(functional.update)

    def flag(self, finite: Any) -> Array:
        if isinstance(finite, tf.distribute.DistributedValues):
            return consensus.reduce_flags(finite)
        return functional.to_flag(finite)

    def nothing(self) -> Any:
        return None if tf.executing_eagerly() else tf.constant(True)

    def scale_loss(self, loss: Any, loss_scale: Array) -> Any:
        return functional.scale(loss, ScaleState(loss_scale, 0, 0))

    def unscale(self, grads: list[Any], loss_scale: Array) -> list[Any]:
        # Whether they are finite is checked when they are applied.
        inverse = functional.invert(loss_scale)
        return [
            None if gradient is None else unscale(f"[{index}]", gradient, inverse)
            for index, gradient in enumerate(grads)
        ]

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

        def run() -> Array:
            operation, flag = ask()
            return _after(operation, self.flag(flag))

        return tf.cond(condition, lambda: tf.constant(False), run, name="unless")


BINDING = _Binding()


def _graph() -> Any:
    """Return the graph that variables made here belong to; `None` is eager mode.

    Inside a `tf.function` that is the context around it.
    """
    with tf.init_scope():
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _after(results: Any, value: Array) -> Array:
    """Return a value that is known when all ops of a structure have run."""
    with tf.control_dependencies(_list_ops(results)):
        return tf.identity(value)


def _group(results: Any) -> Any:
    """Return one op that runs all ops of a structure."""
    return tf.group(*_list_ops(results))


def _list_ops(results: Any) -> list[Any]:
    """List the ops and tensors of what an optimizer returned, of whatever structure."""
    kinds = tf.Operation, tf.Tensor, tf.Variable
    # Under a strategy an assignment is one op for each copy of the variable.
    local = tf.distribute.get_strategy().experimental_local_results
    parts = [part for x in tf.nest.flatten(results) for part in local(x)]
    return [part for part in parts if isinstance(part, kinds)]
