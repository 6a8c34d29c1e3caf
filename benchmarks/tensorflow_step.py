# SPDX-License-Identifier: Apache-2.0
"""What does the LossScaleOptimizer of lossscale.tensorflow add to a training step?

Compared in one run and in turns: the same optimizer unwrapped, and TensorFlow's
own `tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer`. Two models: wide
layers, where a step is arithmetic, and a hundred small variables, where overhead shows.
In tf.function, and compiled by XLA; eager mode is not measured.

Writes results/tensorflow_step.csv. A ratio is the median of the ratios of steps that
were taken in the same turn; the quantiles are those of these ratios.
"""

import csv
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from machine import RESULTS, describe

import lossscale.tensorflow as ls

TURNS = 60
WARM_UP = 5
v1 = tf.compat.v1
SHAPES = {
    "wide layers": [(1024, 1024)] * 6,
    "100 small variables": [(64, 64)] * 100,
}


def adam():
    return v1.train.AdamOptimizer(1e-4)


WRAPPERS = {
    "unwrapped": adam,
    "tensorflow": lambda: v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
        adam(), v1.mixed_precision.DynamicLossScale(2.0**10)
    ),
    "lossscale": lambda: ls.LossScaleOptimizer(adam(), ls.DynamicLossScale(2.0**10)),
}


def training_step(shapes, optimizer, *, jit):
    """Return a compiled step of a plain network with float16 products."""
    rng = np.random.default_rng(0)
    weights = [
        tf.Variable(rng.standard_normal(shape).astype(np.float32) / shape[0] ** 0.5)
        for shape in shapes
    ]
    batch = tf.constant(rng.standard_normal((64, shapes[0][0])), tf.float16)

    def loss():
        hidden = batch
        for weight in weights:
            hidden = tf.tanh(tf.matmul(hidden, tf.cast(weight, tf.float16)))
        return tf.reduce_mean(tf.cast(hidden, tf.float32) ** 2)

    @tf.function(jit_compile=jit)
    def step():
        optimizer.minimize(loss, var_list=weights)
        return tf.reduce_sum(weights[0][0])

    return step


def seconds(step):
    start = time.perf_counter()
    step().numpy()
    return time.perf_counter() - start


def measure(shapes, *, jit):
    """Return the seconds of every step, one list for each wrapper, taken in turns."""
    steps = {
        name: training_step(shapes, make(), jit=jit) for name, make in WRAPPERS.items()
    }
    for step in steps.values():
        for _ in range(WARM_UP):
            seconds(step)
    times = {name: [] for name in steps}
    for turn in range(TURNS):
        names = list(steps)
        for name in names if turn % 2 else reversed(names):
            times[name].append(seconds(steps[name]))
    return {name: np.asarray(values) for name, values in times.items()}


def main() -> None:
    facts = describe("tensorflow-cpu", "numpy")
    columns = [
        "model",
        "mode",
        "optimizer",
        "median_ms",
        "ratio",
        "ratio_10",
        "ratio_90",
    ]
    with (RESULTS / "tensorflow_step.csv").open(
        "w", newline="", encoding="utf-8"
    ) as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *facts])
        for model, shapes in SHAPES.items():
            for mode, jit in (("tf.function", False), ("XLA", True)):
                times = measure(shapes, jit=jit)
                for name, values in times.items():
                    ratios = values / times["unwrapped"]
                    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
                    row = [model, mode, name, f"{np.median(values) * 1e3:.2f}"]
                    row += [f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}"]
                    writer.writerow([*row, *facts.values()])
                    print(
                        f"{model:20} {mode:12} {name:10} {row[3]:>8} ms "
                        f"{middle:6.3f} times unwrapped ({low:.3f} to {high:.3f})"
                    )


if __name__ == "__main__":
    main()
