"""Signatures of wrapped functions: names and positions that `jax.jit` looks up."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import lossscale
import lossscale.jax as ls

POLICY = lossscale.Dynamic(init_scale=8.0)
STEPS = {
    "value_and_grad": lambda loss: ls.value_and_grad(loss, POLICY),
    "with_retries": lambda loss: ls.with_retries(ls.value_and_grad(loss, POLICY)),
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_static_arguments_are_found_by_name_and_by_position(make):
    def loss(weight, x, power):
        return weight * x**power

    weight, x = jnp.float32(1.0), jnp.float32(2.0)
    by_name = jax.jit(make(loss), static_argnames="power")
    assert float(by_name(ls.init(POLICY), weight, x, power=3).grads) == 8.0
    by_position = jax.jit(make(loss), static_argnums=3)
    assert float(by_position(ls.init(POLICY), weight, x, 3).grads) == 8.0


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donating_the_weights_by_name_does_not_donate_the_state():
    def loss(weight, x):
        return (weight * x).sum()

    steps = [ls.value_and_grad(loss, POLICY), ls.accumulate_gradients(loss, POLICY)]
    for step in steps:
        assert next(iter(inspect.signature(step).parameters)) == "state"
    state = ls.init(POLICY)
    step = jax.jit(steps[0], donate_argnames="weight")
    step(state, jnp.ones(3), jnp.ones(3))
    assert not state.scale.is_deleted()


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_the_function_may_have_an_argument_called_state(make):
    step = make(lambda weight, state: weight * state)
    assert float(step(ls.init(POLICY), jnp.float32(1.0), state=3.0).grads) == 3.0
