# SPDX-License-Identifier: Apache-2.0
"""From one replica to all of them and back, under a `tf.distribute` strategy.

A training step runs in each replica; the loss scale is one for all of them. So what
concerns the scale is done in *cross-replica* context, where the gradients of every
replica are at hand, and what concerns the weights goes back into each replica, where
optimizers expect to be. Without a strategy there is nothing to do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from lossscale.core import trees
from lossscale.core.state import Array
from lossscale.errors import ContextError
from lossscale.tensorflow import leaves, verbs


def in_cross_replica_context() -> bool:
    """Whether this is the cross-replica context of a strategy."""
    return bool(
        tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context()
    )


def in_replica_context() -> bool:
    """Whether this is the replica context of a strategy."""
    return bool(tf.distribute.has_strategy() and not in_cross_replica_context())


def check_cross_replica_context(method: str) -> None:
    """Raise, saying what to do, when called from inside one replica."""
    if in_replica_context():
        message = (
            f"{method}() was called in replica context, inside strategy.run; the loss "
            "scale is one for all replicas. Use a LossScaleOptimizer, or merge first: "
            "tf.distribute.get_replica_context().merge_call(lambda strategy, given: "
            f"scale.{method}(given), args=(given,)), with what {method}() takes."
        )
        raise ContextError(message)


def check_replica_context(method: str) -> None:
    """Raise, saying what to do, when called across replicas."""
    if in_cross_replica_context():
        message = (
            f"{method}() was called in cross-replica context; gradients are applied in "
            "each replica. Call it inside strategy.run(step)."
        )
        raise ContextError(message)


def merge(function: Callable[..., Any], *lists: list[Any]) -> Any:
    """Call a function once, with the gradients and variables of all replicas."""
    if not in_replica_context():
        return function(*lists)
    return tf.distribute.get_replica_context().merge_call(
        lambda _, *merged: function(*merged), args=lists
    )


def spread(function: Callable[..., Any], *lists: list[Any]) -> Any:
    """Call a function in each replica, with that replica's own part of the lists."""
    if not in_cross_replica_context():
        return function(*lists)
    strategy = tf.distribute.get_strategy()
    results = strategy.extended.call_for_each_replica(function, args=lists)
    return None if tf.executing_eagerly() else strategy.group(results)


def all_finite(grads: Any) -> Array:
    """Return whether a nest of gradients is finite, in every replica."""

    def own_finite(own: Any) -> Array:
        checked = trees.map_leaves(partial(leaves.checked, "gradient"), own)
        return verbs.all_true(
            leaves.is_finite(leaf) for _, leaf in trees.leaves(checked)
        )

    return in_all(own_finite, grads)


def in_all(check: Callable[..., Array], *lists: Any) -> Array:
    """Return whether a check of its own gradients is true in every replica.

    Args:
        check: Returns a boolean scalar.
        *lists: What it is given; across replicas, of all of them.
    """
    if not in_cross_replica_context():
        return check(*lists)
    strategy = tf.distribute.get_strategy()
    return agreed(strategy.extended.call_for_each_replica(check, args=lists))


def agreed(finite: Any) -> Array:
    """Return whether all replicas, those of other workers too, say finite."""
    strategy = tf.distribute.get_strategy()
    # A sum of float32 is what every strategy can reduce, on every device.
    bad = strategy.extended.call_for_each_replica(
        lambda own: tf.cast(tf.logical_not(verbs.flag(own)), tf.float32), args=(finite,)
    )
    return tf.equal(strategy.reduce(tf.distribute.ReduceOp.SUM, bad, axis=None), 0)
