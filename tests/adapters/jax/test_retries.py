"""A bad step once more on the same batch: how often, when not, and what it leaves."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402
from lossscale.errors import LossScaleError  # noqa: E402


def loss_of(weight, x):
    """A loss whose gradient x overflows in float16 above 65504 / scale."""
    return jnp.sum((weight.astype(jnp.float16) * x).astype(jnp.float32))


def run(policy, x, retries, state=None):
    traces = []

    def counted(weight, x):
        traces.append(1)
        return loss_of(weight, x)

    step = jax.jit(ls.retrying(ls.value_and_grad(counted, policy), retries=retries))
    state = ls.init(policy) if state is None else state
    found = step(state, jnp.float32(1.0), jnp.float16(x))
    assert 2 == len(traces)  # alone, and in the loop
    step(found.state, jnp.float32(1.0), jnp.float16(x))
    assert 2 == len(traces)
    return found


def test_a_good_step_is_not_repeated():
    found = run(Dynamic(init_scale=2.0**10), 4.0, 5)
    assert (4.0, 0, 1) == (found.grads, found.retries, found.state.good_steps)
    assert 2.0**10 == found.state.scale


def test_a_bad_step_is_repeated_until_it_fits():
    found = run(Dynamic(init_scale=2.0**16), 4.0, 10)
    assert bool(found.signal.finite)
    assert (4.0, 3) == (found.grads, found.retries)
    # Three overflows, then a clean step.
    assert (2.0**13, 1, 0) == tuple(value.item() for value in found.state)


def test_the_number_of_attempts_is_bounded():
    found = run(Dynamic(init_scale=2.0**16), 4.0, 2)
    assert not bool(found.signal.finite)
    assert 2 == found.retries
    assert 2.0**13 == found.state.scale


@pytest.mark.parametrize(
    "policy",
    [
        Fixed(2.0**16),
        Dynamic(init_scale=2.0**16, min_scale=2.0**16),
        Dynamic(init_scale=2.0**16, hysteresis=2),
    ],
    ids=["fixed", "at the floor", "waiting for more overflows"],
)
def test_an_attempt_that_could_not_differ_is_not_made(policy):
    found = run(policy, 4.0, 5)
    assert not bool(found.signal.finite)
    assert (0, 2.0**16) == (found.retries, found.state.scale)


def test_a_loss_that_is_not_finite_is_not_tried_again():
    found = run(Dynamic(), float("inf"), 5)
    assert 0 == found.retries
    assert not bool(found.signal.loss_finite)


def test_every_lane_is_repeated_as_often_as_it_needs():
    policy = Dynamic(init_scale=2.0**15)
    step = ls.retrying(ls.value_and_grad(loss_of, policy), retries=9)
    lanes = jax.jit(jax.vmap(step, in_axes=(None, None, 0)))
    x = jnp.array([0.25, 4.0, 16.0], jnp.float16)
    found = lanes(ls.init(policy), jnp.float32(1.0), x)
    assert [0, 2, 4] == found.retries.tolist()
    assert [2.0**15, 2.0**13, 2.0**11] == found.state.scale.tolist()
    assert [0.25, 4.0, 16.0] == found.grads.tolist()


def test_aux_is_that_of_the_last_attempt():
    policy = Dynamic(init_scale=2.0**16)

    def loss(weight):
        return loss_of(weight, jnp.float16(4.0)), {"weight": weight, "n": 3}

    step = ls.retrying(ls.value_and_grad(loss, policy, has_aux=True), retries=5)
    (value, aux), grads, _, _, retries = jax.jit(step)(
        ls.init(policy), jnp.float32(2.0)
    )
    assert (8.0, 2.0, 3, 4.0, 3) == (value, aux["weight"], aux["n"], grads, retries)


def test_a_retry_counts_in_a_scan():
    policy = Dynamic(init_scale=2.0**16, growth_interval=100)
    step = ls.retrying(ls.value_and_grad(loss_of, policy), retries=9)

    @jax.jit
    def loop(state, weight, batches):
        def body(carry, x):
            state, weight = carry
            found = step(state, weight, x)
            new = ls.select(found.signal.finite, weight - found.grads, weight)
            return (found.state, new), found.retries

        return jax.lax.scan(body, (state, weight), batches)

    x = jnp.array([1.0, 1.0, 4.0, 1.0], jnp.float16)
    (state, weight), retries = loop(ls.init(policy), jnp.float32(0.0), x)
    assert [1, 0, 2, 0] == retries.tolist()
    assert (-7.0, 2.0**13) == (weight, state.scale)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_a_number_of_retries_is_wanted(wrong):
    with pytest.raises(LossScaleError, match="retries"):
        ls.retrying(ls.value_and_grad(loss_of, Dynamic()), retries=wrong)
