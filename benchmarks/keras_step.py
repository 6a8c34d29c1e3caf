# SPDX-License-Identifier: Apache-2.0
"""What does the LossScaleOptimizer of lossscale.keras add to a training step?

Compared in one run and in turns: the same optimizer unwrapped, and Keras's own
`LossScaleOptimizer`. Two models under mixed_float16: a small transformer, where a step
is arithmetic, and a hundred small layers, where overhead shows. On TensorFlow in
tf.function and compiled by XLA, on JAX in jit, on torch as it is.

    python benchmarks/keras_step.py               writes results/keras_step.csv
    python benchmarks/keras_step.py --turns 3     tries it out, writes nothing

A ratio is the median of the ratios of steps taken in the same turn; the quantiles are
those of these ratios. Each backend runs in a process of its own.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from machine import RESULTS, describe

TURNS = 60
WARM_UP = 4
PACKAGES = {"tensorflow": "tensorflow-cpu", "jax": "jax", "torch": "torch"}
MODES = {"tensorflow": ("tf.function", "XLA"), "jax": ("jit",), "torch": ("eager",)}
COLUMNS = ("backend", "mode", "model", "optimizer", "median_ms")
RATIOS = ("unwrapped", "keras")


def transformer(keras):
    """Return two blocks of width 192 over 64 tokens, and a batch."""
    layers = keras.layers
    tokens = keras.Input((64,), dtype="int32")
    hidden = layers.Embedding(1000, 192)(tokens)
    for _ in range(2):
        # JAX has no float16 attention on a CPU.
        attention = layers.MultiHeadAttention(6, 32, dtype="float32")
        seen = attention(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + seen)
        wide = layers.Dense(768, activation="gelu")(hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(192)(wide))
    model = keras.Model(tokens, layers.Dense(1000, dtype="float32")(hidden))
    batch = np.random.default_rng(0).integers(0, 1000, (8, 64))
    return model, batch, np.roll(batch, -1, axis=1)


def small_layers(keras):
    """Return a hundred layers of 16 units, and a batch."""
    layers = keras.layers
    rows = keras.Input((16,))
    hidden = rows
    for _ in range(100):
        hidden = layers.Dense(16, activation="tanh", use_bias=False)(hidden)
    model = keras.Model(rows, layers.Dense(10, dtype="float32")(hidden))
    numbers = np.random.default_rng(0)
    batch = numbers.standard_normal((32, 16)).astype(np.float32)
    return model, batch, numbers.integers(0, 10, 32)


MODELS = {"small transformer": transformer, "100 small layers": small_layers}


def tensorflow_step(model, optimizer, loss, data, mode):
    import tensorflow as tf

    batch, labels = (tf.constant(each) for each in data)
    variables = model.trainable_variables

    @tf.function(jit_compile=mode == "XLA")
    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(loss(labels, model(batch, training=True)))
        optimizer.apply(tape.gradient(scaled, variables), variables)
        return scaled

    return lambda: step().numpy()


def jax_step(model, optimizer, loss, data, mode):
    del mode
    import jax
    import keras

    batch, labels = (jax.numpy.asarray(each) for each in data)
    rest = [each.value for each in model.non_trainable_variables]

    @jax.jit
    def step(weights, variables):
        def scaled(weights):
            guess, _ = model.stateless_call(weights, rest, batch, training=True)
            mapping = list(zip(optimizer.variables, variables, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return optimizer.scale_loss(loss(labels, guess))

        gradients = jax.grad(scaled)(weights)
        return optimizer.stateless_apply(variables, gradients, weights)

    state = (
        [each.value for each in model.trainable_variables],
        [each.value for each in optimizer.variables],
    )

    def run():
        nonlocal state
        state = jax.block_until_ready(step(*state))

    return run


def torch_step(model, optimizer, loss, data, mode):
    del mode
    import torch

    batch, labels = (torch.as_tensor(each) for each in data)
    variables = model.trainable_variables

    def step():
        model.zero_grad()
        optimizer.scale_loss(loss(labels, model(batch, training=True))).backward()
        with torch.no_grad():
            optimizer.apply([each.value.grad for each in variables], variables)

    return step


STEPS = {"tensorflow": tensorflow_step, "jax": jax_step, "torch": torch_step}


def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(backend, mode, make_model, turns):
    """Return the seconds of every step by wrapper, taken in turns."""
    import keras

    from lossscale.keras import LossScaleOptimizer

    wrappers = {
        "unwrapped": lambda inner: inner,
        "keras": lambda inner: keras.optimizers.LossScaleOptimizer(inner, 2.0**10),
        "lossscale": lambda inner: LossScaleOptimizer(inner, 2.0**10),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    steps = {}
    for name, wrap in wrappers.items():
        keras.utils.set_random_seed(0)
        model, *data = make_model(keras)
        optimizer = wrap(keras.optimizers.Adam(1e-4))
        optimizer.build(model.trainable_variables)
        steps[name] = STEPS[backend](model, optimizer, loss, data, mode)
        for _ in range(WARM_UP):
            seconds(steps[name])
    times = {name: [] for name in steps}
    for turn in range(turns):
        names = list(steps)
        for name in names if turn % 2 else reversed(names):
            times[name].append(seconds(steps[name]))
    return {name: np.asarray(values) for name, values in times.items()}


def work(backend, turns):
    """Measure in this process, and print the rows as JSON."""
    import keras

    keras.config.set_dtype_policy("mixed_float16")
    for mode in MODES[backend]:
        for model, make_model in MODELS.items():
            times = measure(backend, mode, make_model, turns)
            for name, values in times.items():
                row = [backend, mode, model, name, f"{np.median(values) * 1e3:.2f}"]
                for other in RATIOS:
                    ratios = np.quantile(values / times[other], [0.5, 0.1, 0.9])
                    row += [f"{each:.3f}" for each in ratios]
                print("ROW", json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--backend", choices=sorted(STEPS))
    arguments = parser.parse_args()
    if arguments.backend:
        work(arguments.backend, arguments.turns)
        return
    columns = [*COLUMNS]
    for other in RATIOS:
        columns += [f"to_{other}", f"to_{other}_10", f"to_{other}_90"]
    facts = describe("keras", *PACKAGES.values(), "numpy")
    lines = []
    for backend in STEPS:
        command = [sys.executable, str(Path(__file__)), "--backend", backend]
        process = subprocess.run(  # noqa: S603  # our own interpreter and file
            [*command, "--turns", str(arguments.turns)],
            env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for line in process.stdout.splitlines():
            if line.startswith("ROW"):
                row = json.loads(line.partition(" ")[2])
                lines.append([*row, *facts.values()])
                print(" ".join(f"{each:>17}" for each in row), flush=True)
    if arguments.turns < TURNS:
        print(f"{arguments.turns} turns are a trial: nothing was written.")
        return
    with (RESULTS / "keras_step.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *facts])
        writer.writerows(lines)


if __name__ == "__main__":
    main()
