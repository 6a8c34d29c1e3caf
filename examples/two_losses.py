# SPDX-License-Identifier: Apache-2.0
"""Two losses of very different size in JAX: one scale for both, and a scale for each.

    pip install 'lossscale[numpy,optax]'
    python examples/two_losses.py

One float16 network names handwritten digits and says whether their ink is high up. The
second loss is small, as one in other units is: 1e-10 of a squared error. At the scale
that the first loss bears, its gradients are zero in float16; a scale of its own keeps
them. One policy moves both scales, as a vector.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lossscale.jax as ls
from lossscale import Headroom
from lossscale.demo import load_digits

STEPS, BATCH, SMALL = 300, 64, 1e-10
POLICY = Headroom()
DIGITS = load_digits()


def measure_tilt(images):
    """Return how much more ink is in the upper half; its deviation is about 1."""
    return 9 * (images[:, :32].mean(1) - images[:, 32:].mean(1))


def network(params, images):
    """Return logits and tilt, computed in float16 from float32 parameters."""
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    hidden = jax.nn.relu(images.astype(jnp.float16) @ half["body"])
    found = hidden @ half["digit"], (hidden @ half["tilt"])[:, 0]
    return jax.tree.map(lambda x: x.astype(jnp.float32), found)


def compute_losses(params, images, labels):
    """Return both losses in one array."""
    logits, tilt = network(params, images)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.stack([each.sum(), SMALL * jnp.mean((tilt - measure_tilt(images)) ** 2)])


def run(name, groups):
    """Train once; each row of `groups` says which losses share a scale."""
    rate = optax.linear_schedule(1e-2, 0.0, STEPS)
    optimizer = optax.adam(rate, eps=1e-20)  # below the second loss's gradients

    @jax.jit
    def step(params, opt_state, scales, *batch):
        _, pull = jax.vjp(lambda params: compute_losses(params, *batch), params)
        (scaled,) = jax.vmap(pull)(groups * scales.scale[:, None])  # a row each
        rows, signal = jax.vmap(
            lambda grads, one: ls.unscale(grads, one, measure=POLICY.wants)
        )(scaled, scales)
        grads = jax.tree.map(lambda rows: rows.sum(0), rows)  # of all losses
        updates, moved = optimizer.update(grads, opt_state)
        new = optax.apply_updates(params, updates), moved
        new = ls.select(signal.finite.all(), new, (params, opt_state))
        return *new, ls.update(POLICY, scales, signal), jnp.mean(grads["tilt"] == 0)

    rng = np.random.default_rng(0)  # the same batches in both runs
    shapes = {"body": (64, 64), "digit": (64, 10), "tilt": (64, 1)}
    params = {key: jnp.float32(rng.normal(0, 0.1, shapes[key])) for key in shapes}
    opt_state, first = optimizer.init(params), ls.init(POLICY)
    scales = jax.tree.map(lambda number: jnp.full(len(groups), number), first)
    lost = 0.0
    for _ in range(STEPS):
        rows = rng.integers(len(DIGITS.train_labels), size=BATCH)
        batch = DIGITS.train_images[rows], DIGITS.train_labels[rows]
        params, opt_state, scales, zeros = step(params, opt_state, scales, *batch)
        lost += float(zeros) / STEPS
    logits, tilt = network(params, DIGITS.test_images)
    accuracy = (logits.argmax(1) == DIGITS.test_labels).mean()
    error = jnp.mean((tilt - measure_tilt(DIGITS.test_images)) ** 2)
    powers = ", ".join(f"2^{power:.0f}" for power in jnp.log2(scales.scale))
    print(f"{name:16} digits {accuracy:.1%} tilt error {error:.3f}", end=" ")
    print(f"lost {lost:.0%} scales {powers}")


if __name__ == "__main__":
    run("one scale", jnp.ones((1, 2)))
    run("a scale for each", jnp.eye(2))
