# SPDX-License-Identifier: Apache-2.0
"""float16 on eight devices in JAX: one decision for all of them.

    pip install 'lossscale[numpy,optax]' orbax-checkpoint
    python examples/train_jax_sharded.py

The story of `lossscale demo`. Under `jit` arrays are global, and so is what `lossscale`
sees of them. Under `shard_map`, as in step 200, `axis_name` makes the devices agree.
"""

import os
import tempfile
from functools import partial

DEVICES = "--xla_force_host_platform_device_count=8"  # where there is only a CPU
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import orbax.checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lossscale.jax as ls
from lossscale import Dynamic, Fixed
from lossscale.demo import load_digits

STEPS, BATCH, SHAPES, DIGITS = 300, 64, [(64, 64)] * 7 + [(64, 10)], load_digits()
MESH, WHOLE, ROWS = Mesh(jax.devices(), "data"), PartitionSpec(), PartitionSpec("data")
MUON = optax.contrib.muon(optax.linear_schedule(0.02, 0.0, STEPS))


def network(weights, hidden, dtype):
    for weight in weights[:-1]:
        hidden = jax.nn.gelu(hidden.astype(dtype) @ weight.astype(dtype))
    return (hidden @ weights[-1].astype(dtype)).astype(jnp.float32)


def run(name, dtype, policy):
    def step(train, scale, images, labels, axis_name=None):
        def loss(weights):
            chances = jax.nn.log_softmax(network(weights, images, dtype))
            mean = -jnp.mean(chances[jnp.arange(len(labels)), labels])
            return mean if axis_name is None else jax.lax.pmean(mean, axis_name)

        found = ls.value_and_grad(loss, policy, axis_name=axis_name)(scale, train[0])
        updates, state = MUON.update(found.grads, train[1], train[0])
        new = optax.apply_updates(train[0], updates), state
        return ls.select(found.signal.finite, new, train), found.state, found.signal

    specs = {"in_specs": (WHOLE, WHOLE, ROWS, ROWS), "out_specs": WHOLE}
    mapped = jax.shard_map(partial(step, axis_name="data"), mesh=MESH, **specs)
    step, mapped, random = jax.jit(step), jax.jit(mapped), np.random.default_rng(0)
    weights = [jnp.float32(random.normal(0, 0.02, shape)) for shape in SHAPES]
    saved = (weights, MUON.init(weights)), ls.init(policy)
    (train, scale), skipped = jax.device_put(saved, NamedSharding(MESH, WHOLE)), 0
    for at in range(STEPS):
        pick = random.integers(len(DIGITS.train_labels), size=BATCH)
        images, labels = DIGITS.train_images[pick], DIGITS.train_labels[pick]
        images[17] += np.inf if at == 200 else 0  # one image, on one device
        batch = jax.device_put((images, labels), NamedSharding(MESH, ROWS))
        train, scale, signal = (mapped if at == 200 else step)(train, scale, *batch)
        skipped += not signal.finite
        if at == STEPS // 2:  # everything is saved, and taken up again
            with tempfile.TemporaryDirectory() as folder:
                file = orbax.checkpoint.StandardCheckpointer()
                file.save(f"{folder}/run", (train, scale))
                file.wait_until_finished()
                train, scale = file.restore(f"{folder}/run", (train, scale))
    right = network(train[0], DIGITS.test_images, dtype).argmax(1) == DIGITS.test_labels
    numbers = f"skipped {skipped} scale {scale.scale:,.0f}"
    print(f"{name:22} accuracy {right.mean():.1%} {numbers}")


run("float16, no scaling", jnp.float16, Fixed(1.0))
run("float16, dynamic scale", jnp.float16, Dynamic(growth_interval=20))
