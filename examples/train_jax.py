# SPDX-License-Identifier: Apache-2.0
"""float16 in JAX: without a loss scale the network does not learn, with one it does.

    pip install 'lossscale[numpy,jax]'
    python examples/train_jax.py

The task of `lossscale demo`: eight bias-free layers with weights N(0, 0.02²), trained
by Muon on 1,437 handwritten digits; a checkpoint half-way, and one infinite loss.
"""

import io

import jax
import jax.numpy as jnp
import numpy as np

import lossscale.jax as ls
from lossscale import Dynamic, Fixed
from lossscale.demo import load_digits

STEPS = 300
BATCH = 64
INFINITE_STEP = 200
SHAPES = [(64, 64)] * 7 + [(64, 10)]
DIGITS = load_digits()


def network(weights, hidden, dtype):
    """Compute in one dtype from float32 weights; return float32 logits."""
    for weight in weights[:-1]:
        hidden = jax.nn.gelu(hidden.astype(dtype) @ weight.astype(dtype))
    return (hidden @ weights[-1].astype(dtype)).astype(jnp.float32)


def orthogonalize(update):
    """Bring all singular values of a matrix near 1."""
    update /= jnp.linalg.norm(update) + 1e-7
    for _ in range(5):
        gram = update @ update.T
        update = 3.4445 * update + (2.0315 * gram @ gram - 4.775 * gram) @ update
    return update


def apply_muon(train_state, grads):
    """Return the train state after a step of Muon."""
    weights, momenta, count = train_state
    rate = 0.02 * (1 - count / STEPS)
    momenta = [0.95 * old + grad for old, grad in zip(momenta, grads, strict=True)]
    updates = [0.95 * old + grad for old, grad in zip(momenta, grads, strict=True)]
    weights = [
        weight - rate * orthogonalize(update)
        for weight, update in zip(weights, updates, strict=True)
    ]
    return weights, momenta, count + 1


def save_and_load(tree):
    """Write all arrays to a file, and read them back."""
    leaves, structure = jax.tree.flatten(tree)
    file = io.BytesIO()
    np.savez(file, *leaves)
    file.seek(0)
    loaded = [jnp.asarray(array) for array in np.load(file).values()]
    return jax.tree.unflatten(structure, loaded)


def run(name, dtype, policy):
    """Train once; print test accuracy, skipped steps and the last scale."""

    def compute_loss(weights, images, labels, factor):
        log_probabilities = jax.nn.log_softmax(network(weights, images, dtype))
        return -factor * jnp.mean(log_probabilities[jnp.arange(BATCH), labels])

    def step(train_state, scale_state, *batch):
        differentiate = ls.value_and_grad(compute_loss, policy)
        _, grads, signal, scale_state = differentiate(
            scale_state, train_state[0], *batch
        )
        train_state = ls.apply_if_finite(signal.finite, apply_muon, train_state, grads)
        return train_state, scale_state, ls.leaf_flags(grads)

    step = jax.jit(step, donate_argnums=(0, 1))
    rng = np.random.default_rng(0)  # the same batches in every run
    weights = [jnp.float32(rng.normal(0, 0.02, shape)) for shape in SHAPES]
    train_state = weights, [jnp.zeros_like(weight) for weight in weights], jnp.int32(0)
    scale_state = ls.init(policy)
    for number in range(STEPS):
        rows = rng.integers(len(DIGITS.train_labels), size=BATCH)
        is_infinite = number == INFINITE_STEP and scale_state.scale > 1
        factor = jnp.inf if is_infinite else 1.0
        batch = DIGITS.train_images[rows], DIGITS.train_labels[rows], factor
        train_state, scale_state, flags = step(train_state, scale_state, *batch)
        if is_infinite:
            reasons = list(ls.nonfinite_leaves(train_state[0], flags).values())
            print(f"step {number}: {reasons[0]} in {len(reasons)} layers, skipped")
        if number == STEPS // 2:
            train_state, scale_state = save_and_load((train_state, scale_state))
    weights, _, applied = train_state
    predictions = network(weights, DIGITS.test_images, dtype).argmax(1)
    accuracy = (predictions == DIGITS.test_labels).mean()
    print(
        f"{name:22} accuracy {accuracy:.1%} skipped {STEPS - applied} "
        f"scale {scale_state.scale:,.0f}"
    )


if __name__ == "__main__":
    run("float32", jnp.float32, Fixed(1.0))
    run("float16, no scaling", jnp.float16, Fixed(1.0))
    run("float16, dynamic scale", jnp.float16, Dynamic(growth_interval=20))
