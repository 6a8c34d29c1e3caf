"""Retries of an overflow on the same batch: how many, when, and with what result."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402
from lossscale.errors import LossScaleError  # noqa: E402


def compute_loss(weight, x):
    """Return a loss whose gradient x overflows in float16 above 65504 / scale."""
    return jnp.sum((weight.astype(jnp.float16) * x).astype(jnp.float32))


def run(policy, x, retries, state=None):
    traces = []

    def counted(weight, x):
        traces.append(1)
        return compute_loss(weight, x)

    step = jax.jit(ls.with_retries(ls.value_and_grad(counted, policy), retries=retries))
    state = ls.init(policy) if state is None else state
    result = step(state, jnp.float32(1.0), jnp.float16(x))
    assert 2 == len(traces)  # alone, and in the loop
    step(result.state, jnp.float32(1.0), jnp.float16(x))
    assert 2 == len(traces)
    return result


def test_a_finite_step_is_not_retried():
    result = run(Dynamic(init_scale=2.0**10), 4.0, 5)
    assert (4.0, 0, 1) == (result.grads, result.retries, result.state.good_steps)
    assert 2.0**10 == result.state.scale


def test_an_overflow_is_retried_until_it_is_finite():
    result = run(Dynamic(init_scale=2.0**16), 4.0, 10)
    assert bool(result.signal.finite)
    assert (4.0, 3) == (result.grads, result.retries)
    # Three overflows, then a finite step.
    assert (2.0**13, 1, 0) == tuple(value.item() for value in result.state)


def test_the_number_of_attempts_is_bounded():
    result = run(Dynamic(init_scale=2.0**16), 4.0, 2)
    assert not bool(result.signal.finite)
    assert 2 == result.retries
    assert 2.0**13 == result.state.scale


@pytest.mark.parametrize(
    "policy",
    [
        Fixed(2.0**16),
        Dynamic(init_scale=2.0**16, min_scale=2.0**16),
        Dynamic(init_scale=2.0**16, hysteresis=2),
    ],
    ids=["fixed", "at the minimum", "waiting for more overflows"],
)
def test_a_retry_that_could_not_differ_is_not_made(policy):
    result = run(policy, 4.0, 5)
    assert not bool(result.signal.finite)
    assert (0, 2.0**16) == (result.retries, result.state.scale)


def test_a_nonfinite_loss_is_not_retried():
    result = run(Dynamic(), float("inf"), 5)
    assert 0 == result.retries
    assert not bool(result.signal.loss_finite)


def test_under_vmap_every_element_is_retried_as_often_as_it_needs():
    policy = Dynamic(init_scale=2.0**15)
    step = ls.with_retries(ls.value_and_grad(compute_loss, policy), retries=9)
    mapped = jax.jit(jax.vmap(step, in_axes=(None, None, 0)))
    x = jnp.array([0.25, 4.0, 16.0], jnp.float16)
    result = mapped(ls.init(policy), jnp.float32(1.0), x)
    assert [0, 2, 4] == result.retries.tolist()
    assert [2.0**15, 2.0**13, 2.0**11] == result.state.scale.tolist()
    assert [0.25, 4.0, 16.0] == result.grads.tolist()


def test_aux_is_that_of_the_last_attempt():
    policy = Dynamic(init_scale=2.0**16)

    def loss(weight):
        return compute_loss(weight, jnp.float16(4.0)), {"weight": weight, "n": 3}

    step = ls.with_retries(ls.value_and_grad(loss, policy, has_aux=True), retries=5)
    (value, aux), grads, _, _, retries = jax.jit(step)(
        ls.init(policy), jnp.float32(2.0)
    )
    assert (8.0, 2.0, 3, 4.0, 3) == (value, aux["weight"], aux["n"], grads, retries)


def test_retries_work_in_a_scan():
    policy = Dynamic(init_scale=2.0**16, growth_interval=100)
    step = ls.with_retries(ls.value_and_grad(compute_loss, policy), retries=9)

    @jax.jit
    def loop(state, weight, batches):
        def body(carry, x):
            state, weight = carry
            result = step(state, weight, x)
            new = ls.select(result.signal.finite, weight - result.grads, weight)
            return (result.state, new), result.retries

        return jax.lax.scan(body, (state, weight), batches)

    x = jnp.array([1.0, 1.0, 4.0, 1.0], jnp.float16)
    (state, weight), retries = loop(ls.init(policy), jnp.float32(0.0), x)
    assert [1, 0, 2, 0] == retries.tolist()
    assert (-7.0, 2.0**13) == (weight, state.scale)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_an_invalid_number_of_retries_is_refused(wrong):
    with pytest.raises(LossScaleError, match="retries"):
        ls.with_retries(ls.value_and_grad(compute_loss, Dynamic()), retries=wrong)


def test_a_gradient_that_is_infinite_at_every_scale_counts_as_one_overflow():
    """Each step lowered the scale by 2**4: sqrt has an infinite gradient at 0."""
    policy = Dynamic(init_scale=2.0**16)
    step = jax.jit(ls.with_retries(ls.value_and_grad(jnp.sqrt, policy), retries=3))
    result = step(ls.init(policy), jnp.float32(0.0))
    assert not bool(result.signal.finite)
    assert (3, 2.0**15) == (result.retries, result.state.scale)
    assert jnp.isinf(result.grads)


def test_under_vmap_elements_that_need_more_retries_keep_their_lower_scale():
    policy = Dynamic(init_scale=2.0**15)
    step = ls.with_retries(ls.value_and_grad(compute_loss, policy), retries=1)
    mapped = jax.jit(jax.vmap(step, in_axes=(None, None, 0)))
    x = jnp.array([jnp.inf, 0.5, 16.0, 2.0], jnp.float16)
    result = mapped(ls.init(policy), jnp.float32(0.0), x)
    # The loss of the first element is NaN: a lower scale does not help.
    assert [0, 0, 1, 1] == result.retries.tolist()
    assert [2.0**14, 2.0**15, 2.0**13, 2.0**14] == result.state.scale.tolist()
