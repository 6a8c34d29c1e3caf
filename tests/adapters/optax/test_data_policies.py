"""Policies that see more than a flag, inside `loss_scaled`."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from conformance import DATA_POLICIES, magnitude_trace  # noqa: E402

import lossscale.jax  # noqa: E402
import lossscale.numpy as reference  # noqa: E402
import lossscale.optax as ls  # noqa: E402
from lossscale import Signal, from_portable, to_portable  # noqa: E402

every_policy = pytest.mark.parametrize(
    "policy", DATA_POLICIES, ids=lambda policy: type(policy).__name__
)


def plain(state):
    return tuple(float(value) for value in state)


@every_policy
def test_a_trace_gives_the_states_of_numpy(policy):
    optimizer = ls.loss_scaled(optax.sgd(0.1), policy)
    params = jnp.ones(1)
    opt_state, expected = optimizer.init(params), reference.init(policy)
    update = jax.jit(optimizer.update)
    for finite, magnitude in magnitude_trace(3, 60):
        amax = np.float32(min(magnitude * expected.scale, np.float32(1e30)))
        gradient = jnp.array([amax if finite else np.inf])
        if finite and amax / expected.scale > 1e15:
            continue  # too large to be squared
        _, opt_state = update(gradient, opt_state, params)
        signal = Signal(finite, amax=amax if finite else np.float32(0))
        expected = reference.update(policy, expected, signal)
        assert plain(expected) == plain(ls.get_scale_state(opt_state))


@every_policy
def test_its_state_is_found_saved_and_put_back(policy):
    optimizer = ls.loss_scaled(optax.sgd(0.1), policy)
    params = jnp.ones(1)
    opt_state = optimizer.init(params)
    for gradient in (3.0, jnp.inf, 8.0):
        _, opt_state = optimizer.update(jnp.array([gradient]), opt_state, params)
    found = ls.get_scale_state(opt_state)
    same, state = from_portable(to_portable(policy, found))
    other = ls.with_scale_state(optimizer.init(params), lossscale.jax.init(same, state))
    assert plain(found) == plain(ls.get_scale_state(other))
