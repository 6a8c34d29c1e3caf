# SPDX-License-Identifier: Apache-2.0
"""Train in float16 with TensorFlow: without a loss scale nothing is learned.

    pip install 'lossscale[numpy,tensorflow]' 'keras>=3.15'
    python examples/train_tensorflow.py

The experiment of `lossscale demo`: eight bias-free layers with weights N(0, 0.02²),
trained by Muon on 1,437 handwritten digits. Their gradients are below float16's
smallest number. A dynamic loss scale lifts them above it.
"""

from itertools import pairwise

import keras
import numpy as np
import tensorflow as tf

import lossscale.tensorflow as ls
from lossscale.demo import load_digits

STEPS = 300
BATCH_SIZE = 64
LAYER_SIZES = [64] * 8 + [10]
DIGITS = load_digits()


def network(weights, images, dtype):
    """Return logits in float32, computed in the given dtype from float32 weights."""
    hidden = tf.cast(images, dtype)
    for weight in weights[:-1]:
        hidden = tf.nn.gelu(hidden @ tf.cast(weight.value, dtype), approximate=True)
    return tf.cast(hidden @ tf.cast(weights[-1].value, dtype), tf.float32)


def train(dtype, loss_scale):
    """Train once; return test accuracy, skipped steps and the last scale."""
    random = np.random.default_rng(0)  # the same start and batches in every run
    weights = [
        keras.Variable(random.normal(0, 0.02, shape), dtype="float32")
        for shape in pairwise(LAYER_SIZES)
    ]
    rate = keras.optimizers.schedules.PolynomialDecay(0.02, STEPS, 0.0)
    muon = keras.optimizers.Muon(rate, weight_decay=None, rms_rate=None)
    optimizer = ls.LossScaleOptimizer(muon, loss_scale)

    @tf.function
    def step(images, labels):
        def loss():
            logits = network(weights, images, dtype)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            return tf.reduce_mean(each)

        # Scales, unscales, applies what is finite, and moves the scale.
        optimizer.minimize(loss, weights)

    for _ in range(STEPS):
        chosen = random.integers(len(DIGITS.train_labels), size=BATCH_SIZE)
        step(DIGITS.train_images[chosen], DIGITS.train_labels[chosen])

    guesses = tf.argmax(network(weights, DIGITS.test_images, dtype), axis=1)
    accuracy = np.mean(guesses == DIGITS.test_labels)
    skipped = STEPS - int(optimizer.iterations.numpy())  # counts applied steps only
    return accuracy, skipped, float(optimizer.loss_scale())


def main():
    dynamic = ls.DynamicLossScale(2.0**16, increment_period=20)
    for name, dtype, loss_scale in (
        ("float32", "float32", 1),
        ("float16, no scaling", "float16", 1),
        ("float16, dynamic scale", "float16", dynamic),
    ):
        accuracy, skipped, scale = train(dtype, loss_scale)
        print(f"{name:22} accuracy {accuracy:.1%} skipped {skipped} scale {scale:,.0f}")


if __name__ == "__main__":
    main()
