# SPDX-License-Identifier: Apache-2.0
"""The step on the TensorFlow backend, where there may be several replicas.

Each replica unscales and looks at its own gradients: the inner optimizer sums them over
replicas only later, inside its own `apply`. Keras takes the first replica's word for
all, and applies a NaN of another. Here one overflow anywhere skips the step everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lossscale.core.errors import SettingError
from lossscale.core.state import Array


def count() -> int:
    """Return how many replicas the gradients of this step will be summed over.

    Raises:
        SettingError: If the caller is not inside a replica.
    """
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    if tf.distribute.in_cross_replica_context():
        message = (
            "apply() must be called in a replica context: call it in the function that "
            "strategy.run(...) is given."
        )
        raise SettingError(message)
    replicas: int = tf.distribute.get_replica_context().num_replicas_in_sync
    return replicas


def step(
    inner: Any,
    gradients: list[Any],
    variables: Sequence[Any],
    finite: Array,
    advance: Callable[[Array], None],
) -> None:
    """Update the variables if the gradients of all replicas are finite; then advance.

    Args:
        inner: The inner optimizer.
        gradients: This replica's unscaled gradients.
        variables: What they belong to.
        finite: Whether this replica's gradients are finite.
        advance: Moves the scale, given whether the update was made.
    """
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    def skip() -> Array:
        return tf.constant(False)  # a tensor of it

    def update() -> Array:
        inner.apply(gradients, variables)
        return tf.constant(True)  # a tensor of it

    context = tf.distribute.get_replica_context()
    overflows = tf.cast(tf.logical_not(finite), tf.float32)
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        if context.num_replicas_in_sync > 1:
            finite = context.all_reduce("SUM", overflows) < 1.0
        # Whether the update was made comes out of the branch that makes it. So the
        # scale waits for the update, and does not move if an op of it fails.
        advance(tf.cond(finite, update, skip))
        return

    def across(strategy: Any, gradients: list[Any], overflows: Array) -> None:
        def update() -> Array:
            strategy.extended.call_for_each_replica(
                inner.apply, args=(gradients, variables)
            )
            return tf.constant(True)  # a tensor of it

        finite = strategy.reduce("SUM", overflows, axis=None) < 1.0
        # The branch is taken across replicas: inside of one, it may not merge them,
        # which the inner optimizer does.
        advance(tf.cond(finite, update, skip))

    context.merge_call(across, args=(gradients, overflows))
