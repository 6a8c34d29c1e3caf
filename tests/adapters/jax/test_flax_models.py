"""flax: linen's TrainState, nnx's Optimizer and flax's serialization."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
flax = pytest.importorskip("flax", reason="flax is not installed")
jnp = jax.numpy

from flax import linen, nnx, serialization  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402
from helpers.trees import check_same  # noqa: E402

import lossscale.jax as lsj  # noqa: E402
import lossscale.optax as ls  # noqa: E402
from lossscale import (  # noqa: E402
    Dynamic,
    Fixed,
    ScaleState,
    from_portable,
    to_portable,
)
from lossscale.errors import ContextError, StructureError  # noqa: E402

POLICY = Dynamic(init_scale=2.0**40, growth_interval=10)
"""It starts so high that the first float16 gradients overflow."""


# Neither flax nor optax supports strict promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def make_batch():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
    return x, jnp.sum(x, axis=1, keepdims=True)


class Network(linen.Module):
    @linen.compact
    def __call__(self, x, *, train=True):
        x = linen.Dense(8, dtype=jnp.float16)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return linen.Dense(1, dtype=jnp.float16)(linen.relu(x)).astype(jnp.float32)


class State(TrainState):
    batch_stats: dict


def linen_state():
    x, _ = make_batch()
    variables = Network().init(jax.random.key(0), x)
    return State.create(
        apply_fn=Network().apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=ls.loss_scaled(optax.adam(0.05), POLICY),
    )


@jax.jit
def linen_step(state, x, y):
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        value = jnp.mean((out - y) ** 2)
        return ls.scale_loss(value, state), (value, new["batch_stats"])

    (_, (value, stats)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    new = state.apply_gradients(grads=grads, batch_stats=stats)
    finite = new.opt_state.last_finite
    # The optimizer has skipped the step; select the state it does not contain.
    kept = lsj.select(
        finite, (new.step, new.batch_stats), (state.step, state.batch_stats)
    )
    return new.replace(step=kept[0], batch_stats=kept[1]), value


def test_a_linen_train_state_trains_and_keeps_its_values_on_an_overflow():
    state, losses, skipped = linen_state(), [], 0
    state = state.replace(step=jnp.int32(0))
    for _ in range(60):
        before = state
        state, value = linen_step(state, *make_batch())
        losses.append(float(value))
        if not state.opt_state.last_finite:
            skipped += 1
            check_same(before.params, state.params)
            check_same(before.batch_stats, state.batch_stats)
            check_same(before.opt_state.inner_state, state.opt_state.inner_state)
    assert 10 < skipped < 50
    assert skipped == state.opt_state.total_notfinite
    assert 60 - skipped == state.step == state.opt_state.inner_state[0].count
    assert losses[-1] < 0.2 * losses[0]
    assert 1 == linen_step._cache_size()


def test_compat_flax_replaces_flaxs_scale_in_a_train_state():
    from flax.training import dynamic_scale

    from lossscale.jax.compat import flax as compat_flax

    def train(kind):
        class Scaled(TrainState):
            scaler: kind

        x, y = make_batch()
        model = linen.Dense(1, dtype=jnp.float16)
        state = Scaled.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(1), x),
            tx=optax.sgd(0.05),
            scaler=kind(scale=jnp.float32(2.0**30), fin_steps=jnp.int32(0)),
        )

        @jax.jit
        def step(state):
            def loss(params):
                out = state.apply_fn(params, x).astype(jnp.float32)
                return jnp.mean((out - y) ** 2)

            scaler, ok, _, grads = state.scaler.value_and_grad(loss)(state.params)
            new = state.apply_gradients(grads=grads)
            params = jax.tree.map(
                lambda a, b: jnp.where(ok, a, b), new.params, state.params
            )
            return new.replace(params=params, scaler=scaler)

        for _ in range(30):
            state = step(state)
        return state

    expected, actual = (
        train(dynamic_scale.DynamicScale),
        train(compat_flax.DynamicScale),
    )
    check_same(expected.params, actual.params)
    assert expected.scaler.scale == actual.scaler.scale < 2.0**30


def nnx_model():
    return nnx.Sequential(
        nnx.Linear(4, 8, dtype=jnp.float16, rngs=nnx.Rngs(0)),
        nnx.relu,
        nnx.Linear(8, 1, dtype=jnp.float16, rngs=nnx.Rngs(1)),
    )


@nnx.jit
def nnx_step(model, optimizer, x, y):
    scale = ls.get_scale_state(optimizer)

    def loss(model):
        value = jnp.mean((model(x).astype(jnp.float32) - y) ** 2)
        return lsj.scale(value, scale), value

    grads, value = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return value


def test_an_nnx_optimizer_trains_and_keeps_its_values_on_an_overflow():
    model = nnx_model()
    optimizer = nnx.Optimizer(
        model, ls.loss_scaled(optax.adam(0.02), POLICY), wrt=nnx.Param
    )
    losses, skipped = [], 0
    for _ in range(60):
        before = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model)))
        losses.append(float(nnx_step(model, optimizer, *make_batch())))
        if not optimizer.opt_state.last_finite[...]:
            skipped += 1
            check_same(before, nnx.as_pure(nnx.state(model)))
    assert 10 < skipped < 50
    assert skipped == optimizer.opt_state.total_notfinite[...]
    assert losses[-1] < 0.2 * losses[0]
    assert 2.0**40 > ls.get_scale(optimizer) == ls.get_scale(optimizer.opt_state)


class Noisy(nnx.Module):
    """A network with batch statistics and random numbers."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 32, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(32, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.first(x))))
        return self.last(x).astype(jnp.float32)


def squared_error(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def evaluate(model):
    model.eval()
    value = float(squared_error(model, *make_batch()))
    model.train()
    return value


def make_overflowing_batch():
    x, y = make_batch()
    return x.at[0, 0].set(jnp.inf), y


def test_an_nnx_module_whose_state_would_be_lost_is_refused():
    """Dropout masks were equal at every step, and batch statistics never changed."""
    step = lsj.value_and_grad(squared_error, POLICY)
    model = Noisy(nnx.Rngs(0))
    for argument in (model, {"inside": model}):
        with pytest.raises(ContextError, match=r"Noisy .* nnx\.split"):
            step(lsj.init(POLICY), argument, *make_batch())


def test_an_nnx_module_of_parameters_alone_is_differentiated():
    model = nnx_model()
    expected = nnx.grad(squared_error)(model, *make_batch())
    policy = Fixed(1.0)
    result = lsj.value_and_grad(squared_error, policy)(
        lsj.init(policy), model, *make_batch()
    )
    expected, actual = (jax.tree.leaves(tree) for tree in (expected, result.grads))
    assert 4 == len(expected) == len(actual)
    for expected_leaf, actual_leaf in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(expected_leaf, actual_leaf)


def test_a_split_nnx_module_trains_with_its_state_in_value_and_grad():
    model = Noisy(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(0.02)

    def loss(params, rest, x, y):
        copy = nnx.merge(graphdef, params, rest, copy=True)
        return squared_error(copy, x, y), nnx.state(copy, nnx.Not(nnx.Param))

    @jax.jit
    def step(state, train, x, y):
        params, rest, inner = train
        result = lsj.value_and_grad(loss, POLICY, has_aux=True)(
            state, params, rest, x, y
        )
        updates, inner = optimizer.update(result.grads, inner, params)
        new = optax.apply_updates(params, updates), result.value[1], inner
        return result.state, lsj.select(result.signal.finite, new, train)

    state, train = lsj.init(POLICY), (params, rest, optimizer.init(params))
    before = evaluate(model)
    counts = []
    for number in range(120):
        previous = train
        state, train = step(
            state, train, *(make_overflowing_batch() if number == 80 else make_batch())
        )
        if number == 80:
            check_same(previous[::2], train[::2])
            check_same(previous[1]["norm"], train[1]["norm"])
        counts.append(int(train[1]["dropout"]["rngs"]["count"][...]))
    nnx.update(model, *train[:2])
    assert evaluate(model) < 0.2 * before
    # New random numbers at every step that was applied.
    assert list(range(1, counts[-1] + 1)) == sorted({*counts} - {0})
    assert np.all(model.norm.mean[...] != 0)


def test_batch_statistics_are_selected_alongside_an_nnx_optimizer():
    """An infinite batch left NaN in them permanently."""
    model = Noisy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, ls.loss_scaled(optax.adam(0.02), POLICY), wrt=nnx.Param
    )

    @nnx.jit
    def step(model, optimizer, x, y):
        statistics = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        scale = ls.get_scale_state(optimizer)

        def loss(model):
            return lsj.scale(squared_error(model, x, y), scale)

        optimizer.update(model, nnx.grad(loss)(model))
        new = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        finite = optimizer.opt_state.last_finite[...]
        nnx.update(model, lsj.select(finite, new, statistics))

    before = evaluate(model)
    for number in range(120):
        step(
            model,
            optimizer,
            *(make_overflowing_batch() if number == 80 else make_batch()),
        )
        assert all(
            np.isfinite(x).all()
            for x in jax.tree.leaves(nnx.state(model, nnx.BatchStat))
        )
    assert evaluate(model) < 0.2 * before


def test_two_states_of_one_nnx_module_are_refused_by_select():
    model = Noisy(nnx.Rngs(0))
    old = nnx.state(model, nnx.BatchStat)
    model(jnp.full((2, 4), jnp.inf))
    new = nnx.state(model, nnx.BatchStat)
    with pytest.raises(StructureError, match=r"nnx\.as_pure"):
        lsj.select(jnp.bool_(False), new, old)


def test_an_nnx_optimizers_scale_becomes_portable():
    model = nnx_model()
    optimizer = nnx.Optimizer(
        model, ls.loss_scaled(optax.sgd(0.1), POLICY), wrt=nnx.Param
    )
    nnx_step(model, optimizer, *make_batch())
    portable = to_portable(POLICY, ls.get_scale_state(optimizer))
    assert (POLICY, ScaleState(2.0**39, 0, 0)) == from_portable(portable)


def test_flax_serializes_an_optimizer_state_as_bytes():
    fresh = state = linen_state().replace(step=jnp.int32(0))
    for _ in range(30):
        state, _ = linen_step(state, *make_batch())
    data = serialization.to_bytes(state)
    restored = serialization.from_bytes(fresh, data)
    check_same(state.opt_state, jax.tree.map(jnp.asarray, restored.opt_state))
    check_same(linen_step(state, *make_batch()), linen_step(restored, *make_batch()))
    named = serialization.to_state_dict(state)["opt_state"]["scale_state"]
    assert set(ScaleState._fields) == set(named)


def test_flax_saves_a_bare_scale_state():
    state = lsj.init(POLICY, ScaleState(8.0, 3, 0))
    data = serialization.to_bytes(state)
    restored = serialization.from_bytes(lsj.init(POLICY), data)
    check_same(state, jax.tree.map(jnp.asarray, restored))


def test_state_of_float8_layers_is_not_unscaled():
    state = TrainState.create(
        apply_fn=None,
        params={
            "params": {"w": jnp.ones(2)},
            "_overwrite_with_gradient": {"amax": jnp.zeros(2)},
        },
        tx=ls.loss_scaled(optax.sgd(1.0), Dynamic(init_scale=4.0)),
    )
    grads = {
        "params": {"w": jnp.full(2, 4.0)},
        "_overwrite_with_gradient": {"amax": jnp.full(2, 7.0)},
    }
    after = state.apply_gradients(grads=grads)
    assert [0.0, 0.0] == after.params["params"]["w"].tolist()
    assert [7.0, 7.0] == after.params["_overwrite_with_gradient"]["amax"].tolist()
