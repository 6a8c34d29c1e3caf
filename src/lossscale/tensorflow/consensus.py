# SPDX-License-Identifier: Apache-2.0
"""One decision for all replicas of a `tf.distribute` strategy.

A training step runs in each replica; the loss scale is one for all of them. So the
scale is updated in *cross-replica* context, which has the gradients of every replica,
and the weights are updated in each replica, where optimizers expect to be called.
Without a strategy these functions call what they are given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from lossscale.core import trees
from lossscale.core.state import Array
from lossscale.errors import ContextError
from lossscale.tensorflow.functional import all_true, to_flag
from lossscale.tensorflow.gradient import is_finite, validate_leaf


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


def call_across_replicas(function: Callable[..., Any], *lists: list[Any]) -> Any:
    """Call a function once, with the gradients and variables of all replicas."""
    if not in_replica_context():
        return function(*lists)
    return tf.distribute.get_replica_context().merge_call(
        lambda _, *merged: function(*merged), args=lists
    )


def call_in_each_replica(function: Callable[..., Any], *lists: list[Any]) -> Any:
    """Call a function in each replica, with that replica's values of the lists."""
    if not in_cross_replica_context():
        return function(*lists)
    strategy = tf.distribute.get_strategy()
    results = strategy.extended.call_for_each_replica(function, args=lists)
    return None if tf.executing_eagerly() else strategy.group(results)


def all_finite(grads: Any) -> Array:
    """Return whether a nested structure of gradients is finite, in every replica."""

    def check(grads: Any) -> Array:
        valid = trees.map_leaves(partial(validate_leaf, "gradient"), grads)
        return all_true(is_finite(leaf) for _, leaf in trees.leaves(valid))

    return all_replicas(check, grads)


def all_replicas(check: Callable[..., Array], *lists: Any) -> Array:
    """Return whether a check is true in every replica.

    Args:
        check: Returns a boolean scalar for the values of one replica.
        *lists: Its arguments; in cross-replica context, those of all replicas.
    """
    if not in_cross_replica_context():
        return check(*lists)
    strategy = tf.distribute.get_strategy()
    return reduce_flags(strategy.extended.call_for_each_replica(check, args=lists))


def largest_of_all(measure: Callable[..., Array], *lists: Any) -> Array:
    """Return the largest number of any replica.

    Args:
        measure: Returns a float32 scalar of 0 or more for the values of one replica.
        *lists: Its arguments; in cross-replica context, those of all replicas.
    """
    if not in_cross_replica_context():
        return measure(*lists)
    strategy = tf.distribute.get_strategy()

    def measure_in_row(*values: Any) -> Array:
        # A sum is what every strategy can reduce: each replica has an index in it.
        context = tf.distribute.get_replica_context()
        count = context.num_replicas_in_sync
        index = context.replica_id_in_sync_group
        return tf.one_hot(index, count, dtype=tf.float32) * measure(*values)

    rows = strategy.extended.call_for_each_replica(measure_in_row, args=lists)
    sums = strategy.reduce(tf.distribute.ReduceOp.SUM, rows, axis=None)
    return tf.reduce_max(sums)


def reduce_flags(finite: Any) -> Array:
    """Return whether a flag is true in all replicas, those of other workers too."""
    strategy = tf.distribute.get_strategy()
    # A sum of float32 is what every strategy can reduce, on every device.
    counts = strategy.extended.call_for_each_replica(
        lambda flag: tf.cast(tf.logical_not(to_flag(flag)), tf.float32), args=(finite,)
    )
    return tf.equal(strategy.reduce(tf.distribute.ReduceOp.SUM, counts, axis=None), 0)
