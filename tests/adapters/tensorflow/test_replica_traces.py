"""Recorded loss scales under a distribution strategy, replayed bit for bit."""

from functools import cache

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import numpy as np  # noqa: E402
from helpers.tensorflow_replay import (  # noqa: E402
    in_turn,
    recorded,
)
from helpers.tensorflow_rows import ROWS, rows_of  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402


@cache
def mirrored(count):
    # TensorFlow numbers the collectives of each strategy from the start, so that two
    # strategies of one process meet each other's; reducing on one device avoids it.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(count)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def replicated_gradients(row):
    flags = np.array(row["finite_per_replica"])
    return np.where(flags, 1.0, np.inf).astype(np.float32)


def replicated(row):
    strategy = mirrored(len(row["finite_per_replica"][0]))
    with strategy.scope():
        loss_scale = ls.DynamicLossScale(**row["config"])

    def own(values):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.gather(values, replica)

    def step(values):
        with strategy.scope():
            given = strategy.run(own, args=(values,))
            _, should_apply = loss_scale.update([given, None])
            scales = strategy.experimental_local_results(loss_scale.current_loss_scale)
            goods = strategy.experimental_local_results(loss_scale.good_steps)
            return tuple(map(tf.convert_to_tensor, (should_apply, *scales, *goods)))

    def restart(row):
        loss_scale.current_loss_scale.assign(row["config"]["initial_loss_scale"])
        loss_scale.good_steps.assign(0)

    return step, restart


def replicated_key(row):
    config = row["config"]
    count = len(row["finite_per_replica"][0])
    return count, config["increment_period"], config["multiplier"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_one_bad_replica_is_bad_for_all_as_recorded(compiled):
    files = "dynamic_replicated.tf1.15.5.eager", "dynamic_replicated.tf2.3.4.eager"
    part = slice(None) if compiled else slice(None, None, 3)
    found = in_turn(
        rows_of(files[0])[part],
        replicated,
        replicated_gradients,
        key=replicated_key,
        compiled=compiled,
    )
    for file in files:
        for row in rows_of(file)[part]:
            count = len(row["finite_per_replica"][0])
            expected = [
                (applied, *[scale] * count, *[good] * count)
                for applied, scale, good in recorded(
                    row, "should_apply", "scale", "good"
                )
            ]
            assert expected == found[row["name"]], row["name"]
        assert ROWS[file][0] == len(rows_of(file))
