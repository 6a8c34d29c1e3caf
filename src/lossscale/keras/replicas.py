# SPDX-License-Identifier: Apache-2.0
"""The step on the TensorFlow backend, where there may be several replicas.

Each replica unscales and looks at its own gradients: the inner optimizer sums them over
replicas only later, inside its own `apply`. Keras takes the first replica's word for
all, and applies a NaN of another. Here one overflow anywhere skips the step everywhere.
"""

from collections.abc import Callable
from typing import Any

from lossscale.core.state import Array
from lossscale.errors import SettingError


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
    gradients: list[Any],
    reasons: Array,
    update: Callable[[list[Any]], None],
    advance: Callable[[Array, Array], None],
) -> None:
    """Update the variables if no replica has a reason against it; then advance.

    Args:
        gradients: This replica's unscaled gradients.
        reasons: Why this replica's gradients cannot be applied, a number for each.
        update: Applies gradients.
        advance: Moves the scale, given whether the update was made, and if not, why.
    """
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    def branch(reasons: Array, update: Callable[[], Any]) -> None:
        def updated() -> Array:
            update()
            return tf.constant(True)  # a tensor of it

        # Whether the update was made comes out of the branch that makes it. So the
        # scale waits for the update, and does not move if an op of it fails.
        within = tf.reduce_all(tf.equal(reasons, 0))
        advance(tf.cond(within, updated, lambda: tf.constant(False)), reasons)

    context = tf.distribute.get_replica_context()
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        if context.num_replicas_in_sync > 1:
            reasons = _merge(context.all_reduce("SUM", _split(reasons)))
        branch(reasons, lambda: update(gradients))
        return

    def across(strategy: Any, gradients: list[Any], parts: Array) -> None:
        # The branch is taken across replicas: inside of one, it may not merge them,
        # which the inner optimizer does.
        branch(
            _merge(strategy.reduce("SUM", parts, axis=None)),
            lambda: strategy.extended.call_for_each_replica(update, args=(gradients,)),
        )

    context.merge_call(across, args=(gradients, _split(reasons)))


def _split(reasons: Array) -> Array:
    """Return reasons as flags, a row for each kind: sums are all that is reduced."""
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    return tf.cast(tf.equal(reasons, [[1], [2], [3]]), tf.float32)


def _merge(counts: Array) -> Array:
    """Return one reason for each variable: NaN before infinity before too large."""
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    infinite, nan, large = tf.unstack(counts > 0.0)
    finite = tf.where(large, 3, 0)
    return tf.where(nan, 2, tf.where(infinite, 1, finite))
