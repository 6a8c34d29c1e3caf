"""Weights that vary over the devices of a shard_map: sums, means, retries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import lossscale
import lossscale.jax as ls

POLICY = lossscale.Dynamic(init_scale=8.0)


def map_over_devices(function, **kwargs):
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


def make_varying(weight):
    """Mark a replicated weight as one that differs between devices."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(weight, "d", to="varying")
    return jax.lax.pvary(weight, "d")


pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="one device only")


@pytest.mark.parametrize("on_overflow", ["drop", "skip"])
@pytest.mark.parametrize("nonfinite", [None, 0, 2])
def test_varying_weights_accumulate_their_own_gradients(on_overflow, nonfinite):
    batches = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    if nonfinite is not None:
        batches[1, nonfinite, 0] = np.inf
    step = ls.accumulate_gradients(
        lambda weight, x: (weight * x).mean(),
        POLICY,
        on_overflow=on_overflow,
        axis_name="d",
    )

    def function(state, weight, x):
        result = step(state, make_varying(weight), x[0])
        mean = jax.lax.pmean(result.grads, "d")
        return mean, result.signal.finite, result.used, result.state.scale

    grads, finite, used, scale = map_over_devices(function)(
        ls.init(POLICY), jnp.float32(1.0), batches
    )
    finite_rows = [i for i in range(3) if i != nonfinite]
    assert float(scale) == (8.0 if nonfinite is None else 4.0)
    if on_overflow == "skip" and nonfinite is not None:
        assert not finite
        assert not used.any()
    else:
        assert finite
        assert used.tolist() == [i in finite_rows for i in range(3)]
        np.testing.assert_allclose(grads, batches[:, finite_rows].mean(), rtol=1e-6)


@pytest.mark.parametrize("on_overflow", ["drop", "skip"])
def test_gradients_whose_sum_over_devices_overflows_are_skipped(on_overflow):
    policy = lossscale.Dynamic(init_scale=1.0)
    step = ls.accumulate_gradients(
        lambda weight, x: (weight * x).sum(),
        policy,
        on_overflow=on_overflow,
        axis_name="d",
    )

    def function(state, weight, x):
        result = step(state, weight, x[0])
        return jax.lax.pmean(result.grads, "d"), result.signal.finite

    large = jnp.full((2, 1, 1), 3e38, jnp.float32)
    mean, finite = map_over_devices(function, check_vma=False)(
        ls.init(policy), jnp.float32(1.0), large
    )
    assert bool(jnp.isfinite(mean)) or not finite


def test_without_axis_name_every_device_retries_separately():
    policy = lossscale.Dynamic(init_scale=2.0**16)

    def loss(weight, x):
        return (weight.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)

    step = ls.with_retries(ls.value_and_grad(loss, policy), retries=9)

    def function(state, weight, x):
        result = step(state, make_varying(weight), x[0])
        rows = (result.grads, result.state.scale, result.retries)
        return jax.lax.psum(
            jax.tree.map(
                lambda value: (
                    jnp.zeros(2)
                    .at[jax.lax.axis_index("d")]
                    .set(value.astype(jnp.float32))
                ),
                rows,
            ),
            "d",
        )

    grads, scales, retries = map_over_devices(function)(
        ls.init(policy), jnp.float32(1.0), jnp.array([1.0, 64.0])
    )
    assert grads.tolist() == [1.0, 64.0]
    assert scales.tolist() == [2.0**15, 2.0**9]
    assert retries.tolist() == [1, 7]
