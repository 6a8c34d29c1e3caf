"""Reading and replacing the scale in nested optimizer states."""

import json
from typing import NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = jax.numpy

from helpers.trees import check_same  # noqa: E402

import lossscale.jax  # noqa: E402
import lossscale.optax as ls  # noqa: E402
from lossscale import Dynamic, Fixed, from_portable, to_portable  # noqa: E402
from lossscale.errors import GradientError, StateError  # noqa: E402

PARAMS = {"w": jnp.ones(2)}


class TrainState(NamedTuple):
    step: int
    params: dict
    opt_state: tuple


def make_nested():
    """Return an optimizer whose loss scale is four wrappers deep."""
    optimizer = ls.loss_scaled(optax.adam(0.1), Dynamic(init_scale=32.0))
    optimizer = optax.masked(optax.chain(optimizer, optax.identity()), {"w": True})
    optimizer = optax.MultiSteps(optimizer, 2).gradient_transformation()
    return optax.chain(optax.identity(), optimizer)


def test_the_scale_is_found_at_any_depth():
    state = make_nested().init(PARAMS)
    assert 32.0 == ls.get_scale(state)
    assert 32.0 == ls.get_scale(TrainState(0, PARAMS, state))
    assert (32.0, 0, 0) == ls.get_scale_state(state)
    assert 1 == len(ls.find_states(state))


def test_a_loss_is_scaled_by_the_current_scale_not_by_a_constant():
    # Keras's scale_loss in a custom compiled step bakes the first scale in.
    optimizer = ls.loss_scaled(optax.sgd(0.0), Dynamic(init_scale=8.0))
    state = optimizer.init(PARAMS)
    scaled = jax.jit(lambda state: ls.scale_loss(jnp.float32(3.0), state))
    assert 24.0 == scaled(state)
    _, state = optimizer.update({"w": jnp.full(2, jnp.inf)}, state, PARAMS)
    assert 12.0 == scaled(state)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_loss_is_scaled_in_float32(dtype):
    state = ls.loss_scaled(optax.sgd(0.1), Fixed(2.0**20)).init(PARAMS)
    scaled = ls.scale_loss(jnp.asarray(2.0, dtype), state)
    check_same(jnp.float32(2.0**21), scaled)


def test_a_loss_of_integers_is_refused():
    state = ls.loss_scaled(optax.sgd(0.1)).init(PARAMS)
    with pytest.raises(GradientError, match="int32"):
        ls.scale_loss(jnp.int32(2), state)


def test_a_state_without_a_scale_is_reported():
    with pytest.raises(StateError, match="contains no LossScaledState"):
        ls.get_scale(optax.adam(0.1).init(PARAMS))
    with pytest.raises(StateError, match="dict contains no LossScaledState"):
        ls.scale_loss(jnp.float32(1.0), {"scale": 2.0})


def test_a_state_with_several_scales_is_reported():
    first = ls.loss_scaled(optax.sgd(0.1), Fixed(2.0)).init(PARAMS)
    second = ls.loss_scaled(optax.sgd(0.1), Fixed(4.0)).init(PARAMS)
    with pytest.raises(StateError, match="2 loss scales"):
        ls.get_scale((first, second))
    with pytest.raises(StateError, match="2 loss scales"):
        ls.with_scale_state((first, second), first.scale_state)
    assert [2.0, 4.0] == [ls.get_scale(s) for s in ls.find_states((first, second))]


def test_a_portable_state_is_saved_and_restored():
    policy = Dynamic(init_scale=32.0, growth_interval=10)
    optimizer = optax.chain(ls.loss_scaled(optax.adam(0.1), policy))
    state = optimizer.init(PARAMS)
    for value in (jnp.inf, 1.0, 1.0):
        _, state = optimizer.update({"w": jnp.full(2, value)}, state, PARAMS)
    text = json.dumps(to_portable(policy, ls.get_scale_state(state)))
    loaded_policy, loaded = from_portable(json.loads(text))
    assert policy == loaded_policy
    again = optax.chain(ls.loss_scaled(optax.adam(0.1), loaded_policy))
    fresh = again.init(PARAMS)
    restored = ls.with_scale_state(fresh, lossscale.jax.init(loaded_policy, loaded))
    check_same(state[0].scale_state, restored[0].scale_state)
    check_same(fresh[0].inner_state, restored[0].inner_state)


def test_a_compiled_step_takes_the_restored_state_without_a_new_trace():
    policy = Dynamic()
    optimizer = ls.loss_scaled(optax.adam(0.1), policy)
    state = optimizer.init(PARAMS)
    step = jax.jit(optimizer.update)
    step(PARAMS, state, PARAMS)
    saved = to_portable(policy, ls.get_scale_state(state))
    first = lossscale.jax.init(*from_portable(saved))
    step(PARAMS, ls.with_scale_state(state, first), PARAMS)
    assert 1 == step._cache_size()


def test_an_array_is_called_a_jax_array():
    optimizer = ls.loss_scaled(optax.sgd(0.1))
    state, array = optimizer.init(PARAMS), jnp.ones(2)
    for call, words in (
        (lambda: ls.get_scale(array), "The JAX array contains no LossScaledState"),
        (lambda: optimizer.update(PARAMS, array), "optimizer state is a JAX array"),
        (lambda: ls.with_scale_state(state, array), "new state is a JAX array"),
    ):
        with pytest.raises(StateError, match=words):
            call()
