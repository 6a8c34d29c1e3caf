"""Finite gradients that an optimizer's state cannot hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale
import lossscale.optax as ls
from lossscale.core import headroom

POLICY = lossscale.Dynamic(init_scale=1.0)


def check_finite(tree):
    """Raise if a number anywhere in a tree is not finite."""
    for leaf in jax.tree.leaves(tree):
        assert np.isfinite(np.asarray(leaf, np.float64)).all()


def check_walk(inner, gradients, size):
    """Raise if steps with such gradients leave anything that is not finite."""
    optimizer = ls.loss_scaled(inner, POLICY)
    params = jnp.ones(size)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        # Undo the scale: the gradient is what the optimizer is to see.
        scaled = jnp.full(size, gradient, jnp.float32) * ls.get_scale(state)
        updates, state = update(scaled, state, params)
        params = optax.apply_updates(params, updates)
        check_finite((params, state))
    return state


@pytest.mark.parametrize("skip", ["select", "cond"])
def test_a_moment_in_float16_never_becomes_infinite(skip):
    optimizer = ls.loss_scaled(optax.adam(0.1, mu_dtype=jnp.float16), POLICY, skip=skip)
    params = jnp.ones(2)
    state = optimizer.init(params)
    for gradient in (1e7, 1.0):
        updates, state = optimizer.update(jnp.full(2, gradient), state, params)
        params = optax.apply_updates(params, updates)
        check_finite((params, state))


@pytest.mark.parametrize("size", [1, 10, 13, 1000])
def test_squares_whose_sum_is_rounded_up(size):
    largest = np.float32(headroom.largest_square_root(None, "float32", size))
    check_walk(optax.novograd(0.1), [largest] * 3, size)


def test_the_square_of_a_difference():
    check_walk(optax.adabelief(0.1), [-1.84e19] * 30 + [1.84e19], 1)
