# SPDX-License-Identifier: Apache-2.0
"""Train in float16 with Keras 3: without a loss scale nothing is learned.

    pip install 'lossscale[numpy,keras]' tensorflow   # or jax, or torch
    KERAS_BACKEND=tensorflow python examples/train_keras.py

The experiment of `lossscale demo`: eight bias-free layers with weights
N(0, 0.02²), trained by Muon on 1,437 handwritten digits. Their gradients are below
float16's smallest number. A dynamic loss scale lifts them above it.
"""

import keras

import lossscale
from lossscale.demo import load_digits
from lossscale.keras import LossScaleLogger, LossScaleOptimizer

EPOCHS = 13
BATCH_SIZE = 64
DIGITS = load_digits()


def network(dtype):
    """Return eight layers that compute in `dtype` from float32 weights."""

    def dense(width, **arguments):
        start = keras.initializers.RandomNormal(stddev=0.02, seed=next(seeds))
        return keras.layers.Dense(
            width, use_bias=False, kernel_initializer=start, dtype=dtype, **arguments
        )

    seeds = iter(range(8))
    hidden = [dense(64, activation="gelu") for _ in range(7)]
    return keras.Sequential([keras.Input((64,)), *hidden, dense(10)])


def muon():
    steps = EPOCHS * (len(DIGITS.train_labels) // BATCH_SIZE + 1)
    rate = keras.optimizers.schedules.PolynomialDecay(0.02, steps, 0.0)
    return keras.optimizers.Muon(rate, weight_decay=None, rms_rate=None)


def train(dtype, optimizer, callbacks):
    """Train once; return test accuracy and the history of the epochs."""
    keras.utils.set_random_seed(0)  # the same batches in every run
    model = network(dtype)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    images, labels = DIGITS.train_images, DIGITS.train_labels
    history = model.fit(
        images, labels, BATCH_SIZE, EPOCHS, verbose=0, callbacks=callbacks
    )
    scores = model.evaluate(
        DIGITS.test_images, DIGITS.test_labels, verbose=0, return_dict=True
    )
    return scores["accuracy"], history.history


def main():
    accuracy, _ = train("float32", muon(), [])
    print(f"{'float32':22} accuracy {accuracy:.1%}")
    accuracy, _ = train("mixed_float16", muon(), [])
    print(f"{'float16, no scaling':22} accuracy {accuracy:.1%}")

    policy = lossscale.Dynamic(init_scale=2.0**16, growth_interval=20)
    optimizer = LossScaleOptimizer(muon(), policy=policy)
    accuracy, history = train("mixed_float16", optimizer, [LossScaleLogger()])
    skipped, scale = sum(history["skipped_steps"]), history["loss_scale"][-1]
    numbers = f"accuracy {accuracy:.1%} skipped {skipped} scale {scale:,.0f}"
    print(f"{'float16, dynamic scale':22} {numbers}")


if __name__ == "__main__":
    main()
