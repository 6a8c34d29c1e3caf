"""Micro-batches: the mean of the finite ones, or a skipped step."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.errors import SettingError, SettingTypeError  # noqa: E402

POLICY = Dynamic(init_scale=2.0**10, growth_interval=100)


def compute_loss(weight, x):
    return jnp.mean(weight * x)


def make_batches(nonfinite=(), value=np.inf):
    rows = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)
    for index in nonfinite:
        rows[index, 0] = value
    return rows


def run(x, on_overflow="drop", policy=POLICY, weight=1.0, **options):
    step = jax.jit(
        ls.accumulate_gradients(
            compute_loss, policy, on_overflow=on_overflow, **options
        )
    )
    return step(ls.init(policy), jnp.float32(weight), x)


@pytest.mark.parametrize("on_overflow", ["drop", "skip"])
def test_finite_micro_batches_give_the_gradient_of_the_whole_batch(on_overflow):
    x = make_batches()
    value, grads, signal, state, used = run(x, on_overflow)
    expected = jax.value_and_grad(compute_loss)(jnp.float32(1.0), x)
    assert (float(expected[0]), float(expected[1])) == (value, grads)
    assert bool(signal.finite)
    assert [True] * 4 == used.tolist()
    assert (2.0**10, 1, 0) == tuple(v.item() for v in state)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("nonfinite", [(0,), (3,), (1, 2)])
def test_micro_batches_that_overflow_are_dropped_and_lower_the_scale(nonfinite, value):
    x = make_batches(nonfinite, value)
    result = run(x)
    finite = [row for row in range(4) if row not in nonfinite]
    assert np.mean(x[finite]) == result.grads
    assert np.mean(x[finite]) == result.value
    assert bool(result.signal.finite)
    assert [row in finite for row in range(4)] == result.used.tolist()
    assert (2.0**9, 0) == (result.state.scale, result.state.good_steps)


def test_one_overflow_skips_the_whole_step_with_on_overflow_skip():
    result = run(make_batches((2,)), "skip")
    assert not bool(result.signal.finite)
    assert [False] * 4 == result.used.tolist()
    assert 2.0**9 == result.state.scale


def test_a_step_without_a_finite_micro_batch_is_skipped():
    result = run(make_batches((0, 1, 2, 3), np.nan))
    assert not bool(result.signal.finite)
    assert np.isnan(result.value)
    assert 0.0 == result.grads
    assert 2.0**9 == result.state.scale


def test_the_largest_squarable_gradients_are_summed():
    result = run(np.full((4, 2), 1.8e19, np.float32), policy=Dynamic(init_scale=1.0))
    assert [True] * 4 == result.used.tolist()
    assert np.float32(1.8e19) == result.grads
    assert (True, 1) == (bool(result.signal.finite), result.state.good_steps)


def test_float16_gradients_are_summed_in_float32():
    x = np.full((64, 2), 2.0**-14, np.float16)
    step = jax.jit(ls.accumulate_gradients(compute_loss, POLICY))
    result = step(ls.init(POLICY), jnp.float16(1.0), x)
    assert ("float32", 2.0**-14) == (str(result.grads.dtype), result.grads)


def test_the_mean_of_float64_gradients_keeps_its_digits():
    with jax.enable_x64(True):
        step = ls.accumulate_gradients(lambda weight, x: weight * x, POLICY)
        result = step(ls.init(POLICY), jnp.float64(1.0), jnp.ones(3))
        np.testing.assert_allclose(result.grads, 1.0, rtol=1e-15)


def test_aux_has_one_row_for_each_micro_batch():
    def loss(weight, x):
        return compute_loss(weight, x), {"sum": jnp.sum(x)}

    step = jax.jit(ls.accumulate_gradients(loss, POLICY, has_aux=True))
    (value, aux), grads, _, _, used = step(
        ls.init(POLICY), jnp.float32(1.0), make_batches((1,), np.nan)
    )
    sums = make_batches((1,), np.nan).sum(axis=1)
    assert sums[[0, 2, 3]].tolist() == aux["sum"][used].tolist()
    assert value == grads


def test_several_arguments_may_be_split_and_several_differentiated():
    def loss(x, weights, y, bias):
        return jnp.mean(weights["w"] * x * y) + bias * jnp.mean(y)

    step = jax.jit(
        ls.accumulate_gradients(loss, POLICY, batch_argnums=(0, 2), argnums=(1, 3))
    )
    x, y = make_batches(), make_batches()[::-1].copy()
    weights = {"w": jnp.float32(2.0), "steps": jnp.int32(1)}
    result = step(ls.init(POLICY), x, weights, y, 1.0)
    assert np.mean(x * y) == result.grads[0]["w"]
    assert result.grads[0]["steps"] is None
    assert np.mean(y) == result.grads[1]


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

    step = jax.jit(ls.accumulate_gradients(loss, POLICY))
    variables = {
        "params": jnp.float32(1.0),
        "_overwrite_with_gradient": jnp.float32(99.0),
    }
    x = jnp.array([1.0, -3.0, jnp.inf, 2.0])
    result = step(ls.init(POLICY), variables, x)
    assert 3.0 == result.grads["_overwrite_with_gradient"]
    assert 0.0 == result.grads["params"]
    assert [True, True, False, True] == result.used.tolist()


def test_a_nonfinite_loss_holds_the_scale_unless_another_micro_batch_overflows():
    policy = Dynamic(init_scale=2.0**15, hold_on_nonfinite_loss=True)

    def loss(weight, x):
        return (weight.astype(jnp.float16) * x).astype(jnp.float32)

    step = jax.jit(ls.accumulate_gradients(loss, policy))
    weight = jnp.float32(1.0)
    nonfinite_loss = step(
        ls.init(policy), weight, jnp.array([0.5, jnp.nan], jnp.float16)
    )
    assert (2.0**15, [True, False]) == (
        nonfinite_loss.state.scale,
        nonfinite_loss.used.tolist(),
    )
    both = step(ls.init(policy), weight, jnp.array([0.5, jnp.nan, 8], jnp.float16))
    assert (2.0**14, [True, False, False]) == (both.state.scale, both.used.tolist())


def test_it_is_traced_once():
    traces = []

    def loss(weight, x):
        traces.append(1)
        return compute_loss(weight, x)

    step = jax.jit(ls.accumulate_gradients(loss, POLICY))
    state = ls.init(POLICY)
    for _ in range(3):
        state = step(state, jnp.float32(1.0), make_batches()).state
    assert [1] == traces
    assert 3 == state.good_steps


def test_wrong_arguments_raise_errors_that_name_them():
    with pytest.raises(SettingError, match="'drop' or 'skip'"):
        ls.accumulate_gradients(compute_loss, POLICY, on_overflow="keep")
    with pytest.raises(SettingTypeError, match="policy"):
        ls.accumulate_gradients(compute_loss, "dynamic")
