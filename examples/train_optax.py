# SPDX-License-Identifier: Apache-2.0
"""float16 in optax: without a loss scale nothing moves, with one it learns.

    pip install 'lossscale[numpy,optax]' flax
    python examples/train_optax.py

The story of `lossscale demo`: eight bias-free layers with weights N(0, 0.02²), trained
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

STEPS, BATCH, DIGITS = 300, 64, load_digits()


def network(dtype):
    """Return eight layers that compute in one dtype from float32 weights."""
    start, layers = linen.initializers.normal(0.02), []
    for width in [64] * 7 + [10]:
        dense = linen.Dense(width, use_bias=False, dtype=dtype, kernel_init=start)
        layers += [linen.gelu, dense]
    return linen.Sequential(layers[1:])


def run(name, dtype, policy):
    """Train once; print test accuracy, skipped steps and the last scale."""
    model = network(dtype)
    rate = optax.linear_schedule(0.02, 0.0, STEPS)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(rate))
    optimizer = ls.loss_scaled(chain, policy)  # unscales, checks, skips

    @jax.jit
    def step(params, opt_state, images, labels, factor):
        def scaled_loss(params):
            logits = model.apply(params, images).astype(jnp.float32)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return ls.scale_loss(factor * each.mean(), opt_state)

        grads = jax.grad(scaled_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    random = np.random.default_rng(0)  # the same batches in every run
    params = model.init(jax.random.key(0), DIGITS.train_images[:1])
    opt_state = optimizer.init(params)
    for at in range(STEPS):
        pick = random.integers(len(DIGITS.train_labels), size=BATCH)
        factor = jnp.inf if at == 200 and ls.get_scale(opt_state) > 1 else 1.0
        batch = DIGITS.train_images[pick], DIGITS.train_labels[pick], factor
        params, opt_state = step(params, opt_state, *batch)
        if factor == jnp.inf:
            print(f"step {at}: skipped {opt_state.notfinite_count} in a row")
        if at == STEPS // 2:  # everything is saved, and taken up again
            saved = serialization.to_bytes((params, opt_state))
            new = params, optimizer.init(params)
            params, opt_state = serialization.from_bytes(new, saved)
    right = model.apply(params, DIGITS.test_images).argmax(1) == DIGITS.test_labels
    skipped, scale = opt_state.total_notfinite, ls.get_scale(opt_state)
    print(f"{name:22} accuracy {right.mean():.1%} skipped {skipped} scale {scale:,.0f}")


if __name__ == "__main__":
    run("float32", jnp.float32, Fixed(1.0))
    run("float16, no scaling", jnp.float16, Fixed(1.0))
    run("float16, dynamic scale", jnp.float16, Dynamic(growth_interval=20))
