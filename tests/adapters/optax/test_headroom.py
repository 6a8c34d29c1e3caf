"""Finite gradients that are too large for an optimizer's state or a parameter."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = jax.numpy

import numpy as np  # noqa: E402
from helpers.trees import check_same  # noqa: E402

import lossscale.optax as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402
from lossscale.core import headroom  # noqa: E402

POLICY = Dynamic(init_scale=1.0)
SKIPS = pytest.mark.parametrize("skip", ["select", "cond"])


def check_finite(tree):
    """Raise if a number anywhere in a tree is not finite."""
    for leaf in jax.tree.leaves(tree):
        assert np.isfinite(np.asarray(leaf, np.float64)).all()


def train(inner, gradients, size=2, skip="select", policy=POLICY):
    """Run steps with these unscaled gradients; raise if a number becomes non-finite."""
    optimizer = ls.loss_scaled(inner, policy, skip=skip)
    params = jnp.ones(size)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        # The wrapped optimizer receives the gradient itself.
        scaled = jnp.full(size, gradient, jnp.float32) * ls.get_scale(state)
        updates, state = update(scaled, state, params)
        params = optax.apply_updates(params, updates)
        check_finite((params, state))
    return params, state


@SKIPS
def test_large_gradients_that_are_clipped_train_with_moments_in_float16(skip):
    """The scale went down to 1.2e-38 here, and the weights never changed."""

    def chain():
        adam = optax.adam(0.1, mu_dtype=jnp.float16)
        return optax.chain(optax.clip_by_global_norm(1.0), adam)

    params, state = train(chain(), [1e5] * 200, skip=skip, policy=Dynamic())
    assert (0, 65536.0) == (state.total_notfinite, ls.get_scale(state))
    plain, expected = chain(), jnp.ones(2)
    inner = plain.init(expected)
    update = jax.jit(plain.update)
    for _ in range(200):
        updates, inner = update(jnp.full(2, 1e5), inner, expected)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(expected, params, rtol=1e-6)


@SKIPS
def test_a_gradient_whose_square_would_overflow_is_skipped_and_leaves_the_scale(skip):
    optimizer = ls.loss_scaled(optax.adam(0.1), Dynamic(init_scale=2.0), skip=skip)
    params = jnp.zeros(2)
    before = optimizer.init(params)
    updates, state = optimizer.update(jnp.array([1.0, 1e25]), before, params)
    check_same(jnp.zeros(2), updates)
    check_same(before.inner_state, state.inner_state)
    check_same(before.scale_state, state.scale_state)
    assert (False, True, 1) == (
        state.last_finite,
        state.last_too_large,
        state.total_notfinite,
    )
    _, state = optimizer.update(jnp.array([1.0, jnp.inf]), before, params)
    assert (False, 1.0) == (state.last_too_large, ls.get_scale(state))


@SKIPS
def test_a_moment_in_float16_never_becomes_infinite(skip):
    adam = optax.adam(0.1, mu_dtype=jnp.float16)
    params, state = train(adam, [1e7, 1.0, -1e7], skip=skip)
    assert 0 == state.total_notfinite
    assert not np.array_equal(params, np.ones(2))


@SKIPS
def test_a_sum_of_squares_over_many_steps_never_becomes_infinite(skip):
    _, state = train(optax.adagrad(0.1), [4e18] * 40, skip=skip)
    assert 0 == state.total_notfinite
    assert np.all(state.inner_state[0].sum_of_squares > 3e38)


@pytest.mark.parametrize("size", [1, 10, 13, 1000])
def test_a_sum_of_squares_that_is_rounded_up_stays_finite(size):
    largest = np.float32(headroom.largest_square_root(None, "float32", size))
    train(optax.novograd(0.1), [largest] * 3, size)


@pytest.mark.parametrize("inner", [optax.adabelief(0.1), optax.adan(0.1)])
def test_the_square_of_a_difference_stays_finite(inner):
    train(inner, [-4.6e18] * 30 + [4.6e18, -4.6e18], 1)


@SKIPS
def test_an_update_that_would_overflow_a_float16_parameter_is_not_applied(skip):
    params = jnp.array([1.0, 65504.0, -65504.0, 65504.0], jnp.float16)
    optimizer = ls.loss_scaled(optax.sgd(1.0), Fixed(1.0), skip=skip)
    grads = jnp.array([-2.0, -100.0, 65504.0, 4.0], jnp.float16)
    updates, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    assert [3.0, 65504.0, -65504.0, 65504.0] == after.tolist()
    assert state.last_finite


def test_a_float32_parameter_at_the_largest_number_stays_finite():
    params = jnp.full(2, jnp.finfo(jnp.float32).max)
    optimizer = ls.loss_scaled(optax.sgd(1.0), Fixed(1.0))
    updates, _ = optimizer.update(jnp.full(2, -4.6e18), optimizer.init(params), params)
    check_finite(optax.apply_updates(params, updates))


def test_a_state_that_is_initially_infinite_may_change():
    """The best value of a plateau is infinite until the first loss."""
    optimizer = ls.loss_scaled(optax.contrib.reduce_on_plateau(), Fixed(1.0))
    state = optimizer.init(jnp.ones(2))
    assert jnp.inf == state.inner_state.best_value
    _, state = optimizer.update(jnp.ones(2), state, value=jnp.float32(3.0))
    assert 3.0 == state.inner_state.best_value


def test_gradients_below_a_quintillion_are_never_too_large():
    _, state = train(optax.sgd(1e-18), [1e18, -1e18], size=1000)
    assert 0 == state.total_notfinite
