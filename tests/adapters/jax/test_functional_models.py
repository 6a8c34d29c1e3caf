"""Equinox modules, Haiku transforms and plain functions, trained with loss scaling."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = jax.numpy

from helpers.trees import check_same  # noqa: E402

import lossscale.jax as lsj  # noqa: E402
import lossscale.optax as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402

POLICY = Dynamic(init_scale=2.0**40, growth_interval=10)
"""It starts so high that the first float16 gradients overflow."""


# Neither Equinox, Haiku nor optax supports strict promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def make_batch():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
    return x, jnp.sum(x, axis=1, keepdims=True)


def to_float16(tree):
    """Return a tree with its float32 arrays in float16."""

    def cast(leaf):
        is_float32 = isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
        return leaf.astype(jnp.float16) if is_float32 else leaf

    return jax.tree.map(cast, tree)


def check_training(step, params, state, arrays=lambda params: params):
    """Raise unless early steps are skipped without a trace, and later ones learn."""
    losses, skipped = [], 0
    for _ in range(60):
        before = params, state
        params, state, value = step(params, state, *make_batch())
        losses.append(float(value))
        (scaled_state,) = ls.find_states(state)
        if not scaled_state.last_finite:
            skipped += 1
            check_same(arrays(before[0]), arrays(params))
            check_same(before[1].inner_state, state.inner_state)
    if not 10 < skipped < 50 or losses[-1] > 0.2 * losses[0]:
        message = f"{skipped} steps were skipped, the losses were {losses}"
        raise AssertionError(message)


def test_plain_functions_train():
    optimizer = ls.loss_scaled(optax.adam(0.05), POLICY)
    rng = np.random.default_rng(1)
    params = {
        "first": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32),
        "second": jnp.asarray(rng.normal(size=(8, 1)), jnp.float32),
    }

    def loss(params, x, y):
        weights = to_float16(params)
        hidden = jax.nn.relu(to_float16(x) @ weights["first"])
        return jnp.mean(((hidden @ weights["second"]).astype(jnp.float32) - y) ** 2)

    @jax.jit
    def step(params, state, x, y):
        def scaled(params):
            value = loss(params, x, y)
            return ls.scale_loss(value, state), value

        grads, value = jax.grad(scaled, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    check_training(step, params, optimizer.init(params))
    assert 1 == step._cache_size()


def test_haiku_transforms_train():
    haiku = pytest.importorskip("haiku", reason="Haiku is not installed")
    model = haiku.without_apply_rng(
        haiku.transform(lambda x: haiku.nets.MLP([8, 1])(x))  # noqa: PLW0108
    )
    optimizer = ls.loss_scaled(optax.adam(0.02), POLICY)
    params = model.init(jax.random.key(0), make_batch()[0])

    @jax.jit
    def step(params, state, x, y):
        def scaled(params):
            out = model.apply(to_float16(params), to_float16(x))
            value = jnp.mean((out.astype(jnp.float32) - y) ** 2)
            return ls.scale_loss(value, state), value

        grads, value = jax.grad(scaled, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    check_training(step, params, optimizer.init(params))


def test_equinox_modules_train():
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
    model = equinox.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
    optimizer = ls.loss_scaled(optax.adam(0.02), POLICY)

    @equinox.filter_jit
    def step(model, state, x, y):
        @equinox.filter_grad(has_aux=True)
        def scaled(model):
            out = jax.vmap(to_float16(model))(to_float16(x)).astype(jnp.float32)
            value = jnp.mean((out - y) ** 2)
            return ls.scale_loss(value, state), value

        grads, value = scaled(model)
        params = equinox.filter(model, equinox.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return equinox.apply_updates(model, updates), state, value

    state = optimizer.init(equinox.filter(model, equinox.is_inexact_array))
    check_training(
        step, model, state, lambda tree: equinox.filter(tree, equinox.is_array)
    )


def test_the_functional_api_takes_an_equinox_module_with_its_functions():
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
    model = equinox.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
    x, y = make_batch()
    state = lsj.init(Fixed(8.0))

    @equinox.filter_grad
    def scaled(model):
        return lsj.scale(jnp.mean((jax.vmap(model)(x) - y) ** 2), state)

    # The gradient of a function or a number in a module is None.
    grads, signal = lsj.unscale(scaled(model), state)
    plain = equinox.filter_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
    check_same(plain, grads)
    updated = equinox.apply_updates(model, grads)
    assert model.activation is lsj.select(signal.finite, updated, model).activation
    check_same(
        equinox.filter(model, equinox.is_array),
        equinox.filter(lsj.select(jnp.bool_(False), updated, model), equinox.is_array),
    )


def test_equinox_saves_an_optimizer_state_to_a_file(tmp_path):
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
    optimizer = ls.loss_scaled(optax.adam(0.1), Dynamic())
    params = {"w": jnp.ones(3)}
    fresh = optimizer.init(params)
    _, state = optimizer.update({"w": jnp.full(3, jnp.inf)}, fresh, params)
    file = tmp_path / "state.eqx"
    equinox.tree_serialise_leaves(file, state)
    check_same(state, equinox.tree_deserialise_leaves(file, fresh))


def test_an_equinox_loop_does_not_bake_in_the_first_scale():
    # Keras's scale_loss in a custom compiled step bakes the first scale in.
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
    optimizer = ls.loss_scaled(optax.identity(), Dynamic(init_scale=4.0))

    @equinox.filter_jit
    def step(weight, state, factor):
        grads = jax.grad(lambda w: ls.scale_loss(w * factor, state))(weight)
        return optimizer.update(grads, state)

    weight = jnp.float32(1.0)
    state, steps = optimizer.init(weight), []
    for factor in (3.0, jnp.inf, 3.0, jnp.inf, 3.0):
        updates, state = step(weight, state, jnp.float32(factor))
        steps.append((float(updates), float(ls.get_scale(state))))
    # Each gradient is 3 whatever the scale is by then.
    assert [(3.0, 4.0), (0.0, 2.0), (3.0, 2.0), (0.0, 1.0), (3.0, 1.0)] == steps
