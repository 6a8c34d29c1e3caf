"""Signatures, axes of a shard_map, sums over devices, float64."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import lossscale
import lossscale.jax as ls

POLICY = lossscale.Dynamic(init_scale=8.0)
STEPS = {
    "value_and_grad": lambda loss: ls.value_and_grad(loss, POLICY),
    "retrying": lambda loss: ls.retrying(ls.value_and_grad(loss, POLICY)),
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_static_arguments_are_found_by_name_and_by_place(make):
    def loss(weight, x, power):
        return weight * x**power

    weight, x = jnp.float32(1.0), jnp.float32(2.0)
    by_name = jax.jit(make(loss), static_argnames="power")
    assert float(by_name(ls.init(POLICY), weight, x, power=3).grads) == 8.0
    by_place = jax.jit(make(loss), static_argnums=3)
    assert float(by_place(ls.init(POLICY), weight, x, 3).grads) == 8.0


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donating_the_weights_by_name_does_not_donate_the_state():
    def loss(weight, x):
        return (weight * x).sum()

    steps = [ls.value_and_grad(loss, POLICY), ls.accumulating(loss, POLICY)]
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


def _mapped(function, **kwargs):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = PartitionSpec
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(spec(), spec(), spec("d")),
            out_specs=spec(),
            **kwargs,
        )
    )


two_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="one device only")


@two_devices
@pytest.mark.parametrize("bad", ["drop", "skip"])
@pytest.mark.parametrize("where", [None, 0, 2])
def test_micro_batches_of_weights_that_vary(bad, where):
    """Weights that vary along the axis keep their own gradients; pmean wants them."""
    batches = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    if where is not None:
        batches[1, where, 0] = np.inf
    step = ls.accumulating(
        lambda weight, x: (weight * x).mean(), POLICY, bad=bad, axis_name="d"
    )

    def function(state, weight, x):
        if hasattr(jax.lax, "pcast"):
            varying = jax.lax.pcast(weight, "d", to="varying")
        else:
            varying = jax.lax.pvary(weight, "d")
        found = step(state, varying, x[0])
        mean = jax.lax.pmean(found.grads, "d")
        return mean, found.signal.finite, found.used, found.state.scale

    grads, finite, used, scale = _mapped(function)(
        ls.init(POLICY), jnp.float32(1.0), batches
    )
    clean = [i for i in range(3) if i != where]
    assert float(scale) == (8.0 if where is None else 4.0)
    if bad == "skip" and where is not None:
        assert not finite
        assert not used.any()
    else:
        assert finite
        assert used.tolist() == [i in clean for i in range(3)]
        np.testing.assert_allclose(grads, batches[:, clean].mean(), rtol=1e-6)


@two_devices
@pytest.mark.parametrize("bad", ["drop", "skip"])
def test_gradients_that_overflow_when_devices_add_theirs_up(bad):
    policy = lossscale.Dynamic(init_scale=1.0)
    step = ls.accumulating(
        lambda weight, x: (weight * x).sum(), policy, bad=bad, axis_name="d"
    )

    def function(state, weight, x):
        found = step(state, weight, x[0])
        return jax.lax.pmean(found.grads, "d"), found.signal.finite

    large = jnp.full((2, 1, 1), 3e38, jnp.float32)
    mean, finite = _mapped(function, check_vma=False)(
        ls.init(policy), jnp.float32(1.0), large
    )
    assert bool(jnp.isfinite(mean)) or not finite


@two_devices
def test_devices_that_retry_for_themselves():
    policy = lossscale.Dynamic(init_scale=2.0**16)

    def loss(weight, x):
        return (weight.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)

    step = ls.retrying(ls.value_and_grad(loss, policy), retries=9)

    def function(state, weight, x):
        if hasattr(jax.lax, "pcast"):
            weight = jax.lax.pcast(weight, "d", to="varying")
        else:
            weight = jax.lax.pvary(weight, "d")
        found = step(state, weight, x[0])
        rows = (found.grads, found.state.scale, found.retries)
        return jax.lax.psum(
            jax.tree.map(
                lambda one: (
                    jnp.zeros(2)
                    .at[jax.lax.axis_index("d")]
                    .set(one.astype(jnp.float32))
                ),
                rows,
            ),
            "d",
        )

    grads, scales, retries = _mapped(function)(
        ls.init(policy), jnp.float32(1.0), jnp.array([1.0, 64.0])
    )
    assert grads.tolist() == [1.0, 64.0]
    assert scales.tolist() == [2.0**15, 2.0**9]
    assert retries.tolist() == [1, 7]


def test_the_mean_of_float64_keeps_its_digits():
    with jax.enable_x64(True):
        step = ls.accumulating(lambda weight, x: weight * x, POLICY)
        found = step(ls.init(POLICY), jnp.float64(1.0), jnp.ones(3))
        np.testing.assert_allclose(found.grads, 1.0, rtol=1e-15)
