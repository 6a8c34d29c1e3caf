"""Micro-batches: the mean of the good ones, or no step at all."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.errors import SettingError, SettingTypeError  # noqa: E402

POLICY = Dynamic(init_scale=2.0**10, growth_interval=100)


def loss_of(weight, x):
    return jnp.mean(weight * x)


def batches_of(bad=(), value=np.inf):
    rows = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)
    for at in bad:
        rows[at, 0] = value
    return rows


def run(x, bad="drop", policy=POLICY, weight=1.0, **options):
    step = jax.jit(ls.accumulating(loss_of, policy, bad=bad, **options))
    return step(ls.init(policy), jnp.float32(weight), x)


@pytest.mark.parametrize("bad", ["drop", "skip"])
def test_good_micro_batches_are_the_whole_batch(bad):
    x = batches_of()
    value, grads, signal, state, used = run(x, bad)
    expected = jax.value_and_grad(loss_of)(jnp.float32(1.0), x)
    assert (float(expected[0]), float(expected[1])) == (value, grads)
    assert bool(signal.finite)
    assert [True] * 4 == used.tolist()
    assert (2.0**10, 1, 0) == tuple(v.item() for v in state)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [(0,), (3,), (1, 2)])
def test_bad_micro_batches_are_dropped_and_the_policy_hears_of_it(at, value):
    x = batches_of(at, value)
    found = run(x)
    good = [row for row in range(4) if row not in at]
    assert np.mean(x[good]) == found.grads
    assert np.mean(x[good]) == found.value
    assert bool(found.signal.finite)
    assert [row in good for row in range(4)] == found.used.tolist()
    assert (2.0**9, 0) == (found.state.scale, found.state.good_steps)


def test_one_bad_micro_batch_makes_the_whole_step_bad_if_that_is_asked_for():
    found = run(batches_of((2,)), "skip")
    assert not bool(found.signal.finite)
    assert [False] * 4 == found.used.tolist()
    assert 2.0**9 == found.state.scale


def test_a_step_without_a_good_micro_batch_is_a_bad_one():
    found = run(batches_of((0, 1, 2, 3), np.nan))
    assert not bool(found.signal.finite)
    assert np.isnan(found.value)
    assert 0.0 == found.grads
    assert 2.0**9 == found.state.scale


def test_a_sum_beyond_float32_makes_the_step_bad():
    found = run(np.full((4, 2), 2e38, np.float32), policy=Dynamic(init_scale=1.0))
    assert [True] * 4 == found.used.tolist()
    assert not bool(found.signal.finite)
    assert 0.5 == found.state.scale


def test_float16_gradients_are_added_up_in_float32():
    x = np.full((64, 2), 2.0**-14, np.float16)
    step = jax.jit(ls.accumulating(loss_of, POLICY))
    found = step(ls.init(POLICY), jnp.float16(1.0), x)
    assert ("float32", 2.0**-14) == (str(found.grads.dtype), found.grads)


def test_aux_has_one_row_for_each_micro_batch():
    def loss(weight, x):
        return loss_of(weight, x), {"sum": jnp.sum(x)}

    step = jax.jit(ls.accumulating(loss, POLICY, has_aux=True))
    (value, aux), grads, _, _, used = step(
        ls.init(POLICY), jnp.float32(1.0), batches_of((1,), np.nan)
    )
    sums = batches_of((1,), np.nan).sum(axis=1)
    assert sums[[0, 2, 3]].tolist() == aux["sum"][used].tolist()
    assert value == grads


def test_several_arguments_may_be_cut_and_several_differentiated():
    def loss(x, weights, y, bias):
        return jnp.mean(weights["w"] * x * y) + bias * jnp.mean(y)

    step = jax.jit(ls.accumulating(loss, POLICY, batch_argnums=(0, 2), argnums=(1, 3)))
    x, y = batches_of(), batches_of()[::-1].copy()
    weights = {"w": jnp.float32(2.0), "steps": jnp.int32(1)}
    found = step(ls.init(POLICY), x, weights, y, 1.0)
    assert np.mean(x * y) == found.grads[0]["w"]
    assert found.grads[0]["steps"] is None
    assert np.mean(y) == found.grads[1]


def test_float8_state_is_the_largest_of_the_micro_batches_that_were_used():
    @jax.custom_vjp
    def layer(weight, amax, x):
        return weight * x

    layer.defvjp(
        lambda weight, amax, x: (weight * x, x),
        lambda x, g: (g * x, jnp.abs(x), jnp.zeros_like(x)),
    )

    def loss(v, x):
        return layer(v["params"], v["_overwrite_with_gradient"], x)

    step = jax.jit(ls.accumulating(loss, POLICY))
    variables = {
        "params": jnp.float32(1.0),
        "_overwrite_with_gradient": jnp.float32(99.0),
    }
    x = jnp.array([1.0, -3.0, jnp.inf, 2.0])
    found = step(ls.init(POLICY), variables, x)
    assert 3.0 == found.grads["_overwrite_with_gradient"]
    assert 0.0 == found.grads["params"]
    assert [True, True, False, True] == found.used.tolist()


def test_a_loss_that_is_not_finite_holds_the_scale_but_an_overflow_beside_it_does_not():
    policy = Dynamic(init_scale=2.0**15, hold_on_nonfinite_loss=True)

    def loss(weight, x):
        return (weight.astype(jnp.float16) * x).astype(jnp.float32)

    step = jax.jit(ls.accumulating(loss, policy))
    weight = jnp.float32(1.0)
    lost = step(ls.init(policy), weight, jnp.array([0.5, jnp.nan], jnp.float16))
    assert (2.0**15, [True, False]) == (lost.state.scale, lost.used.tolist())
    both = step(ls.init(policy), weight, jnp.array([0.5, jnp.nan, 8], jnp.float16))
    assert (2.0**14, [True, False, False]) == (both.state.scale, both.used.tolist())


def test_it_is_traced_once():
    traces = []

    def loss(weight, x):
        traces.append(1)
        return loss_of(weight, x)

    step = jax.jit(ls.accumulating(loss, POLICY))
    state = ls.init(POLICY)
    for _ in range(3):
        state = step(state, jnp.float32(1.0), batches_of()).state
    assert [1] == traces
    assert 3 == state.good_steps


def test_mistakes_are_named():
    with pytest.raises(SettingError, match="'drop' or 'skip'"):
        ls.accumulating(loss_of, POLICY, bad="keep")
    with pytest.raises(SettingTypeError, match="policy"):
        ls.accumulating(loss_of, "dynamic")
