# SPDX-License-Identifier: Apache-2.0
"""float16 in JAX: without a loss scale nothing moves, with one it learns.

    pip install 'lossscale[numpy,jax]'
    python examples/train_jax.py

The story of `lossscale demo`: eight bias-free layers with weights N(0, 0.02²), trained
by Muon on 1,437 handwritten digits; a checkpoint half-way, and one infinite loss.
"""

import io

import jax
import jax.numpy as jnp
import numpy as np

import lossscale.jax as ls
from lossscale import Dynamic, Fixed
from lossscale.demo import load_digits

STEPS, BATCH, SHAPES, DIGITS = 300, 64, [(64, 64)] * 7 + [(64, 10)], load_digits()


def network(weights, hidden, dtype):
    for weight in weights[:-1]:
        hidden = jax.nn.gelu(hidden.astype(dtype) @ weight.astype(dtype))
    return (hidden @ weights[-1].astype(dtype)).astype(jnp.float32)


def muon(train, grads):
    weights, momenta, count = [*train[0]], [*train[1]], train[2]
    for at, grad in enumerate(grads):
        momenta[at] = 0.95 * momenta[at] + grad
        step = 0.95 * momenta[at] + grad
        step /= jnp.linalg.norm(step) + 1e-7
        for _ in range(5):  # brings all singular values near 1
            gram = step @ step.T
            step = 3.4445 * step + (2.0315 * gram @ gram - 4.775 * gram) @ step
        weights[at] -= 0.02 * (1 - count / STEPS) * step
    return weights, momenta, count + 1


def run(name, dtype, policy):
    def loss(weights, images, labels, factor):
        chances = jax.nn.log_softmax(network(weights, images, dtype))
        return -factor * jnp.mean(chances[jnp.arange(BATCH), labels])

    def step(train, scale, *batch):
        found = ls.value_and_grad(loss, policy)(scale, train[0], *batch)
        train = ls.apply_if_finite(found.signal.finite, muon, train, found.grads)
        return train, found.state, ls.leaf_flags(found.grads)

    step, random = jax.jit(step, donate_argnums=(0, 1)), np.random.default_rng(0)
    weights = [jnp.float32(random.normal(0, 0.02, shape)) for shape in SHAPES]
    train, scale = (weights, [0 * w for w in weights], jnp.int32(0)), ls.init(policy)
    for at in range(STEPS):
        pick = random.integers(len(DIGITS.train_labels), size=BATCH)
        factor = jnp.inf if at == 200 and scale.scale > 1 else 1.0
        batch = DIGITS.train_images[pick], DIGITS.train_labels[pick], factor
        train, scale, flags = step(train, scale, *batch)
        if factor == jnp.inf:
            kinds = [*ls.bad_leaves(train[0], flags).values()]
            print(f"step {at}: {kinds[0]} in {len(kinds)} layers, skipped")
        if at == STEPS // 2:  # everything is saved, and taken up again
            file, (leaves, tree) = io.BytesIO(), jax.tree.flatten((train, scale))
            np.savez(file, *leaves)
            leaves = [*map(jnp.asarray, np.load(io.BytesIO(file.getvalue())).values())]
            train, scale = jax.tree.unflatten(tree, leaves)
    right = network(train[0], DIGITS.test_images, dtype).argmax(1) == DIGITS.test_labels
    skipped, accuracy = STEPS - train[2], right.mean()
    print(f"{name:22} accuracy {accuracy:.1%} skipped {skipped} scale {scale[0]:,.0f}")


run("float32", jnp.float32, Fixed(1.0))
run("float16, no scaling", jnp.float16, Fixed(1.0))
run("float16, dynamic scale", jnp.float16, Dynamic(growth_interval=20))
