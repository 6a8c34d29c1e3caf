# SPDX-License-Identifier: Apache-2.0
"""One decision for all replicas, on the TensorFlow backend.

Each replica unscales and checks its own gradients: the inner optimizer sums them over
replicas only later, inside its own `apply`. Keras uses the first replica's flag for
all, and applies a NaN of another. Here an overflow in one replica skips the step in
all of them.
"""

from collections.abc import Callable
from typing import Any

from lossscale.core.state import Array
from lossscale.errors import SettingError


def count_replicas() -> int:
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


def apply_or_skip(
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
        advance: Moves the scale, given whether the step was applied and the reasons.
    """
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    def branch(reasons: Array, update: Callable[[], Any]) -> None:
        def apply() -> Array:
            update()
            return tf.constant(True)  # depends on the update inside a tf.function

        # The branch that makes the update returns the flag. So the scale waits for the
        # update, and does not move if one of its ops fails.
        is_applicable = tf.reduce_all(tf.equal(reasons, 0))
        advance(tf.cond(is_applicable, apply, lambda: tf.constant(False)), reasons)

    context = tf.distribute.get_replica_context()
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        if context.num_replicas_in_sync > 1:
            reasons = _decode(context.all_reduce("SUM", _encode(reasons)))
        branch(reasons, lambda: update(gradients))
        return

    def decide(strategy: Any, gradients: list[Any], parts: Array) -> None:
        # The branch is taken across replicas: inside of one, it may not merge them,
        # which the inner optimizer does.
        branch(
            _decode(strategy.reduce("SUM", parts, axis=None)),
            lambda: strategy.extended.call_for_each_replica(update, args=(gradients,)),
        )

    context.merge_call(decide, args=(gradients, _encode(reasons)))


def _encode(reasons: Array) -> Array:
    """Return reasons as flags, a row for each kind: sums are all that is reduced."""
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    return tf.cast(tf.equal(reasons, [[1], [2], [3]]), tf.float32)


def _decode(counts: Array) -> Array:
    """Return one reason for each variable: NaN before infinity before too large."""
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    infinite, nan, large = tf.unstack(counts > 0.0)
    finite = tf.where(large, 3, 0)
    return tf.where(nan, 2, tf.where(infinite, 1, finite))
