"""Parameters: dtypes of updates, integers, shapes without values."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = jax.numpy

import numpy as np  # noqa: E402
from helpers.trees import check_same  # noqa: E402

import lossscale.jax  # noqa: E402
import lossscale.optax as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402
from lossscale.errors import StateError  # noqa: E402

SKIPS = pytest.mark.parametrize("skip", ["select", "cond"])


@SKIPS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["sgd", "adam", "lion", "adafactor", "rmsprop"])
def test_updates_have_the_dtypes_of_optax(name, dtype, skip):
    """They were float32 for parameters in float16 and bfloat16."""
    inner = getattr(optax, name)(0.1)
    params = {"w": jnp.ones((2, 3), dtype), "b": jnp.ones(3, "float32")}
    expected, _ = inner.update(params, inner.init(params), params)
    optimizer = ls.loss_scaled(inner, Fixed(4.0), skip=skip)
    scaled = jax.tree.map(lambda leaf: leaf * 4, params)
    updates, _ = optimizer.update(scaled, optimizer.init(params), params)
    for wanted, actual in zip(*map(jax.tree.leaves, (expected, updates)), strict=True):
        assert wanted.dtype == actual.dtype
        np.testing.assert_allclose(
            np.float32(wanted), np.float32(actual), rtol=2.0**-7, atol=1e-3
        )


def test_init_accepts_shapes_and_dtypes_as_parameters():
    params = {"w": jnp.ones((2, 3), jnp.float16), "n": jnp.int32(3)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    optimizer = ls.loss_scaled(optax.adam(0.1))
    check_same(optimizer.init(params), optimizer.init(shapes))


def compute_loss(params, x):
    return jnp.sum(params["w"].astype(jnp.float32) * x) * params["n"]


@SKIPS
@pytest.mark.parametrize("gradient", ["float0", "none"])
def test_integer_parameters_do_not_change(gradient, skip):
    policy = Dynamic(init_scale=4.0)
    params = {"w": jnp.ones(2), "n": jnp.int32(3), "b": jnp.bool_(True)}
    optimizer = ls.loss_scaled(optax.adam(0.5), policy, skip=skip)
    state = optimizer.init(params)
    x = jnp.float32(2.0)

    @jax.jit
    def step(params, state):
        if gradient == "float0":
            grads = jax.grad(
                lambda p: ls.scale_loss(compute_loss(p, x), state), allow_int=True
            )(params)
        else:
            differentiate = lossscale.jax.value_and_grad(compute_loss, Fixed(1.0))
            grads = differentiate(lossscale.jax.init(Fixed(1.0)), params, x).grads
            grads = jax.tree.map(lambda leaf: leaf * ls.get_scale(state), grads)
        updates, state = optimizer.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    updates, after, state = step(params, state)
    check_same((params["n"], params["b"]), (after["n"], after["b"]))
    assert 0 == updates["n"]
    plain = optax.adam(0.5)
    expected, inner = plain.update(
        {"w": jnp.full(2, 6.0)}, plain.init({"w": jnp.ones(2)}), {"w": jnp.ones(2)}
    )
    np.testing.assert_allclose(expected["w"], updates["w"], rtol=1e-6)
    assert jax.tree.leaves(inner)[0] == state.inner_state[0].count


def test_the_state_of_another_optimizer_is_reported():
    optimizer = ls.loss_scaled(optax.adam(0.1))
    params = jnp.ones(2)
    with pytest.raises(StateError, match=r"is a tuple, expected the LossScaledState"):
        optimizer.update(params, optax.adam(0.1).init(params), params)


@pytest.mark.parametrize("wrong", [{"scale": 8.0}, Dynamic(), (8.0, 0, 0), 8.0])
def test_with_scale_state_accepts_only_a_scale_state(wrong):
    state = ls.loss_scaled(optax.adam(0.1)).init(jnp.ones(2))
    with pytest.raises(StateError, match="expected a ScaleState"):
        ls.with_scale_state(state, wrong)


def test_a_step_of_optax_is_exported():
    optimizer = ls.loss_scaled(optax.sgd(0.5), Fixed(4.0))
    params = jnp.ones(2)
    arguments = params, optimizer.init(params), params
    jax.export.register_namedtuple_serialization(
        optax.EmptyState, serialized_name="optax.EmptyState"
    )
    data = jax.export.export(jax.jit(optimizer.update))(*arguments).serialize()
    again = jax.export.deserialize(data).call(*arguments)
    check_same(optimizer.update(*arguments), again)
