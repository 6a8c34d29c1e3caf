"""`loss_scaled` on eight devices: an overflow on one of them skips on all."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = jax.numpy

from helpers.trees import check_same  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import lossscale.optax as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402

if len(jax.devices()) < 8:
    pytest.skip("there are fewer than eight devices", allow_module_level=True)

POLICY = Dynamic(init_scale=16.0)
SKIPS = pytest.mark.parametrize("skip", ["select", "cond"])


def make_mesh(*shape):
    names = ("data", "model")[: len(shape)]
    return Mesh(np.array(jax.devices()[:8]).reshape(shape), names)


def make_shards(overflow):
    """Return eight scaled gradients of four numbers; one may be infinite."""
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    if overflow:
        values[5, 2] = np.inf
    return values


@SKIPS
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize(
    ("shape", "axes"), [((8,), "data"), ((4, 2), ("data", "model"))]
)
def test_devices_of_a_shard_map_skip_together(skip, overflow, shape, axes):
    # Each device has a shard of the weights, as in FSDP, and its own gradients.
    optimizer = ls.loss_scaled(optax.adam(0.5), POLICY, axis_name=axes, skip=skip)
    params = jnp.zeros((8, 4))
    state = optimizer.init(params)
    spec = PartitionSpec(axes)
    specs = jax.tree.map(lambda x: spec if x.ndim else PartitionSpec(), state)
    step = jax.jit(
        jax.shard_map(
            optimizer.update,
            mesh=make_mesh(*shape),
            in_specs=(spec, specs, spec),
            out_specs=(spec, specs),
        )
    )
    grads = jnp.asarray(make_shards(overflow))
    updates, after = step(grads, state, params)
    single = ls.loss_scaled(optax.adam(0.5), POLICY, skip=skip)
    expected = jax.jit(single.update)(grads, single.init(params), params)
    check_same(expected, (updates, after))
    assert overflow is not bool(after.last_finite)


def test_devices_without_axis_name_diverge():
    optimizer = ls.loss_scaled(optax.sgd(0.5), POLICY)
    spec = PartitionSpec("data")

    def step(grads):
        _, state = optimizer.update(grads, optimizer.init(grads))
        return ls.get_scale(state)[None]

    scales = jax.shard_map(
        step, mesh=make_mesh(8), in_specs=spec, out_specs=spec, check_vma=False
    )(jnp.asarray(make_shards(overflow=True)))
    assert [16.0] * 5 + [8.0] + [16.0] * 2 == scales.tolist()


@SKIPS
@pytest.mark.parametrize("overflow", [False, True])
def test_pmap_devices_skip_together(skip, overflow):
    optimizer = ls.loss_scaled(optax.adam(0.5), POLICY, axis_name="data", skip=skip)
    params = jnp.zeros((8, 4))
    state = jax.pmap(optimizer.init)(params)
    step = jax.pmap(optimizer.update, axis_name="data")
    updates, after = step(jnp.asarray(make_shards(overflow)), state, params)
    assert [not overflow] * 8 == after.last_finite.tolist()
    assert [8.0 if overflow else 16.0] * 8 == ls.get_scale(after).tolist()
    assert overflow is not bool(np.any(updates))


@SKIPS
@pytest.mark.parametrize("overflow", [False, True])
def test_sharded_arrays_under_jit_need_no_axis(skip, overflow):
    optimizer = ls.loss_scaled(optax.adam(0.5), POLICY, skip=skip)
    sharding = NamedSharding(make_mesh(4, 2), PartitionSpec("data", "model"))
    replicated = jnp.asarray(make_shards(overflow))
    expected = jax.jit(optimizer.update)(
        replicated, optimizer.init(replicated), replicated
    )
    grads = jax.device_put(replicated, sharding)
    state = jax.jit(optimizer.init)(grads)
    updates, after = jax.jit(optimizer.update)(grads, state, grads)
    assert sharding.is_equivalent_to(updates.sharding, 2)
    assert sharding.is_equivalent_to(after.inner_state[0].mu.sharding, 2)
    assert after.scale_state.scale.sharding.is_fully_replicated
    np.testing.assert_array_equal(expected[0], updates)
    assert (expected[1].last_finite, ls.get_scale(expected[1])) == (
        after.last_finite,
        ls.get_scale(after),
    )
