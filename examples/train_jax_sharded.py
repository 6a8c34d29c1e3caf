# SPDX-License-Identifier: Apache-2.0
"""float16 on eight devices in JAX: one decision for all of them.

    pip install 'lossscale[numpy,optax]' orbax-checkpoint
    python examples/train_jax_sharded.py

The task of `lossscale demo`. Under `jit` arrays are global, and so is the check of the
gradients. Under `shard_map`, as in step 200, `axis_name` makes all devices skip
together.
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

STEPS = 300
BATCH = 64
MAPPED_STEP = 200
SHAPES = [(64, 64)] * 7 + [(64, 10)]
DIGITS = load_digits()
MESH = Mesh(jax.devices(), "data")
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec("data")
MUON = optax.contrib.muon(optax.linear_schedule(0.02, 0.0, STEPS))


def network(weights, hidden, dtype):
    """Compute in one dtype from float32 weights; return float32 logits."""
    for weight in weights[:-1]:
        hidden = jax.nn.gelu(hidden.astype(dtype) @ weight.astype(dtype))
    return (hidden @ weights[-1].astype(dtype)).astype(jnp.float32)


def make_steps(dtype, policy):
    """Return a compiled step on global arrays, and one in a `shard_map`."""

    def step(train_state, scale_state, images, labels, axis_name=None):
        def compute_loss(weights):
            log_probabilities = jax.nn.log_softmax(network(weights, images, dtype))
            mean = -jnp.mean(log_probabilities[jnp.arange(len(labels)), labels])
            return mean if axis_name is None else jax.lax.pmean(mean, axis_name)

        weights, opt_state = train_state
        differentiate = ls.value_and_grad(compute_loss, policy, axis_name=axis_name)
        _, grads, signal, scale_state = differentiate(scale_state, weights)
        updates, opt_state = MUON.update(grads, opt_state, weights)
        new = optax.apply_updates(weights, updates), opt_state
        return ls.select(signal.finite, new, train_state), scale_state, signal

    mapped = jax.shard_map(
        partial(step, axis_name="data"),
        mesh=MESH,
        in_specs=(REPLICATED, REPLICATED, SHARDED, SHARDED),
        out_specs=REPLICATED,
    )
    return jax.jit(step), jax.jit(mapped)


def save_and_load(tree):
    """Write a checkpoint, and restore it with the same shardings."""
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = orbax.checkpoint.StandardCheckpointer()
        checkpointer.save(f"{folder}/run", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(f"{folder}/run", tree)


def run(name, dtype, policy):
    """Train once; print test accuracy, skipped steps and the last scale."""
    step, mapped_step = make_steps(dtype, policy)
    rng = np.random.default_rng(0)
    weights = [jnp.float32(rng.normal(0, 0.02, shape)) for shape in SHAPES]
    first = (weights, MUON.init(weights)), ls.init(policy)
    train_state, scale_state = jax.device_put(first, NamedSharding(MESH, REPLICATED))
    skipped = 0
    for number in range(STEPS):
        rows = rng.integers(len(DIGITS.train_labels), size=BATCH)
        images, labels = DIGITS.train_images[rows], DIGITS.train_labels[rows]
        is_mapped = number == MAPPED_STEP
        images[17] += np.inf if is_mapped else 0  # one image, on one device
        batch = jax.device_put((images, labels), NamedSharding(MESH, SHARDED))
        train_state, scale_state, signal = (mapped_step if is_mapped else step)(
            train_state, scale_state, *batch
        )
        skipped += not signal.finite
        if number == STEPS // 2:
            train_state, scale_state = save_and_load((train_state, scale_state))
    predictions = network(train_state[0], DIGITS.test_images, dtype).argmax(1)
    accuracy = (predictions == DIGITS.test_labels).mean()
    print(
        f"{name:22} accuracy {accuracy:.1%} skipped {skipped} "
        f"scale {scale_state.scale:,.0f}"
    )


run("float16, no scaling", jnp.float16, Fixed(1.0))
run("float16, dynamic scale", jnp.float16, Dynamic(growth_interval=20))
