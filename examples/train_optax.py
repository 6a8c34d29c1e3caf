# SPDX-License-Identifier: Apache-2.0
"""float16 in optax: without a loss scale the network does not learn, with one it does.

    pip install 'lossscale[numpy,optax]' flax
    python examples/train_optax.py

The task of `lossscale demo`: eight bias-free layers with weights N(0, 0.02²), trained
by Muon on 1,437 handwritten digits; a checkpoint half-way, and one infinite loss.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import linen, serialization

import lossscale.optax as ls
from lossscale import Dynamic, Fixed
from lossscale.demo import load_digits

STEPS = 300
BATCH = 64
INFINITE_STEP = 200
DIGITS = load_digits()


def make_network(dtype):
    """Return eight layers that compute in one dtype from float32 weights."""
    init = linen.initializers.normal(0.02)
    layers = []
    for width in [64] * 7:
        layers.append(linen.Dense(width, use_bias=False, dtype=dtype, kernel_init=init))
        layers.append(linen.gelu)
    layers.append(linen.Dense(10, use_bias=False, dtype=dtype, kernel_init=init))
    return linen.Sequential(layers)


def run(name, dtype, policy):
    """Train once; print test accuracy, skipped steps and the last scale."""
    model = make_network(dtype)
    rate = optax.linear_schedule(0.02, 0.0, STEPS)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(rate))
    optimizer = ls.loss_scaled(chain, policy)  # unscales, checks, skips

    @jax.jit
    def step(params, opt_state, images, labels, factor):
        def scaled_loss(params):
            logits = model.apply(params, images).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return ls.scale_loss(factor * losses.mean(), opt_state)

        grads = jax.grad(scaled_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    rng = np.random.default_rng(0)  # the same batches in every run
    params = model.init(jax.random.key(0), DIGITS.train_images[:1])
    opt_state = optimizer.init(params)
    for number in range(STEPS):
        rows = rng.integers(len(DIGITS.train_labels), size=BATCH)
        is_infinite = number == INFINITE_STEP and ls.get_scale(opt_state) > 1
        factor = jnp.inf if is_infinite else 1.0
        batch = DIGITS.train_images[rows], DIGITS.train_labels[rows], factor
        params, opt_state = step(params, opt_state, *batch)
        if is_infinite:
            print(f"step {number}: {'applied' if opt_state.last_finite else 'skipped'}")
        if number == STEPS // 2:  # save everything, and continue from the saved state
            saved = serialization.to_bytes((params, opt_state))
            fresh = params, optimizer.init(params)
            params, opt_state = serialization.from_bytes(fresh, saved)
    predictions = model.apply(params, DIGITS.test_images).argmax(1)
    accuracy = (predictions == DIGITS.test_labels).mean()
    skipped, scale = opt_state.total_notfinite, ls.get_scale(opt_state)
    print(f"{name:22} accuracy {accuracy:.1%} skipped {skipped} scale {scale:,.0f}")


if __name__ == "__main__":
    run("float32", jnp.float32, Fixed(1.0))
    run("float16, no scaling", jnp.float16, Fixed(1.0))
    run("float16, dynamic scale", jnp.float16, Dynamic(growth_interval=20))
