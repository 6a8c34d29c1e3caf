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
from lossscale.keras.gradients import Findings


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
    findings: Findings,
    update: Callable[[list[Any]], None],
    advance: Callable[[Array, Findings], None],
) -> None:
    """Update the variables if no replica has a reason against it; then advance.

    Args:
        gradients: This replica's unscaled gradients.
        findings: What this replica's gradients are.
        update: Applies gradients.
        advance: Moves the scale, given whether the step was applied, and the findings
            of all replicas.
    """
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    def branch(findings: Findings, update: Callable[[], Any]) -> None:
        def apply() -> Array:
            update()
            return tf.constant(True)  # depends on the update inside a tf.function

        # The branch that makes the update returns the flag. So the scale waits for the
        # update, and does not move if one of its ops fails.
        is_applicable = tf.reduce_all(tf.equal(findings.reasons, 0))
        advance(tf.cond(is_applicable, apply, lambda: tf.constant(False)), findings)

    context = tf.distribute.get_replica_context()
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        if context.num_replicas_in_sync > 1:
            sums = context.all_reduce("SUM", _encode(findings, context))
            findings = _decode(sums, findings)
        branch(findings, lambda: update(gradients))
        return

    def decide(strategy: Any, gradients: list[Any], encoded: Array) -> None:
        # The branch is taken across replicas: inside of one, it may not merge them,
        # which the inner optimizer does.
        branch(
            _decode(strategy.reduce("SUM", encoded, axis=None), findings),
            lambda: strategy.extended.call_for_each_replica(update, args=(gradients,)),
        )

    context.merge_call(decide, args=(gradients, _encode(findings, context)))


def _encode(findings: Findings, context: Any) -> Array:
    """Return findings as numbers that are added up: sums are all that is reduced.

    A row of flags for each kind of reason; then an element for the largest magnitude of
    each replica, zero in the others.
    """
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    flags = tf.cast(tf.equal(findings.reasons, [[1], [2], [3]]), tf.float32)
    pieces = [tf.reshape(flags, [-1])]
    if findings.amax is not None:
        index = context.replica_id_in_sync_group
        is_own = tf.one_hot(index, context.num_replicas_in_sync, dtype=tf.float32)
        pieces.append(is_own * findings.amax)
    return tf.concat(pieces, axis=0)


def _decode(sums: Array, local_findings: Findings) -> Findings:
    """Return the findings of all replicas: NaN before infinity before too large."""
    import tensorflow as tf  # noqa: PLC0415  # of this backend alone

    count = 3 * local_findings.reasons.shape[0]
    flags = tf.reshape(sums[:count] > 0.0, [3, -1])
    infinite, nan, large = tf.unstack(flags)
    finite = tf.where(large, 3, 0)
    reasons = tf.where(nan, 2, tf.where(infinite, 1, finite))
    amax = None if local_findings.amax is None else tf.reduce_max(sums[count:])
    return Findings(reasons, amax)
