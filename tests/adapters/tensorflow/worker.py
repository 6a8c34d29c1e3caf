"""One process of test_multi_worker.py: trains, and prints what it saw as JSON."""

import json
import os

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import lossscale.tensorflow as ls

INDEX = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
NO_WORKER = -1
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
MOMENTUM = {
    "v1": lambda: tf.compat.v1.train.MomentumOptimizer(1.0, 0.5),
    "keras 3": lambda: keras.optimizers.SGD(1.0, momentum=0.5),
    "tf_keras": lambda: tf_keras.optimizers.SGD(1.0, momentum=0.5),
}


def gradient(bad, good):
    """Return this worker's gradient: NaN if it is the bad one."""
    return tf.where(tf.equal(bad, INDEX), np.float32(np.nan), np.float32(good))


def train(kind):
    with STRATEGY.scope():
        weight = keras.Variable(10.0) if kind == "keras 3" else tf.Variable(10.0)
        loss_scale = ls.DynamicLossScale(8, 2, 2)
        optimizer = ls.LossScaleOptimizer(MOMENTUM[kind](), loss_scale)

    @tf.function
    def run(bad):
        STRATEGY.run(lambda: optimizer.apply_gradients([(gradient(bad, 0.5), weight)]))

    seen = []
    for bad in (NO_WORKER, 1, NO_WORKER, NO_WORKER, 0):
        run(tf.constant(bad))
        seen.append([float(weight.numpy()), float(loss_scale())])
    return seen


def update():
    with STRATEGY.scope():
        loss_scale = ls.DynamicLossScale(8, 1, 2)

        @tf.function
        def run(bad):
            return loss_scale.update([gradient(bad, 1.0)])[1]

        return [
            [float(loss_scale()), finite]
            for bad in (NO_WORKER, 1, NO_WORKER)
            for finite in [bool(run(tf.constant(bad)))]
        ]


def overflow_of_the_sum():
    with STRATEGY.scope():
        weight = tf.Variable(1.0)
        descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = ls.LossScaleOptimizer(descent, ls.DynamicLossScale(8, 2, 2))

    @tf.function
    def run():
        STRATEGY.run(lambda: optimizer.apply_gradients([(tf.constant(3e38), weight)]))

    run()
    return [float(weight.numpy()), float(optimizer.loss_scale())]


if __name__ == "__main__":
    found = {kind: train(kind) for kind in MOMENTUM}
    print(json.dumps(found | {"update": update(), "sum": overflow_of_the_sum()}))  # noqa: T201
