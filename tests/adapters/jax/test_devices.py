"""Eight devices: shard_map, pmap and jit with sharded arrays, one of them gone bad."""

from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
MEASURES = ("nan", "amax", "norm", "zero_fraction", "subnormal_fraction")
BAD = [np.inf, -np.inf, np.nan]


def mesh_of(shape=(4, 2), names=("data", "model"), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def rows(bad=None, device=5):
    """Return one row of gradients for each device, one number of one device bad."""
    values = np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4)
    if bad is not None:
        values[device, 1] = bad
    return values


def test_there_are_eight_devices():
    assert 8 == jax.device_count()


def loss_of(weight, x):
    return jnp.mean(weight * x)


def train_step(state, weight, x, axis_name):
    """Return a data-parallel step: gradients averaged, one decision for all."""
    found = ls.value_and_grad(loss_of, POLICY, axis_name=axis_name)(state, weight, x)
    grads = jax.lax.pmean(found.grads, axis_name)
    weight = ls.select(found.signal.finite, weight - grads, weight)
    return found.state, weight, found.signal.finite


@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "no check"])
@pytest.mark.parametrize("axes", ["all", ("data", "model")], ids=["one", "two"])
@pytest.mark.parametrize("bad", BAD)
def test_under_shard_map_one_bad_device_makes_all_skip(axes, checked, bad):
    mesh = mesh_of((8,), ("all",)) if axes == "all" else mesh_of()

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P(axes)),
        out_specs=(P(), P(), P(axes)),
        check_vma=checked,
    )
    def step(state, weight, x):
        if checked:  # else JAX adds the gradients of a replicated weight up itself
            weight = jax.lax.pcast(weight, axes, to="varying")
        state, weight, finite = train_step(state, weight, x, axes)
        return state, jax.lax.pmean(weight, axes), finite[None]

    state = ls.init(POLICY, device=NamedSharding(mesh, P()))
    weight = jnp.zeros((1, 4))
    state, after, finite = step(state, weight, rows(bad))
    assert [False] * 8 == finite.tolist()
    assert np.zeros((1, 4)).tolist() == after.tolist()
    assert (512.0, 0, 0) == tuple(value.item() for value in state)
    state, after, finite = step(state, weight, rows())
    assert [True] * 8 == finite.tolist()
    expected = -np.mean(rows() / 4, axis=0, keepdims=True)
    assert expected.tolist() == after.tolist()
    assert (512.0, 1, 0) == tuple(value.item() for value in state)
    assert 1 == step._cache_size()


def test_under_shard_map_gradients_that_jax_has_added_up_need_no_more():
    """A replicated weight's gradient is the same everywhere already."""

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh_of((8,), ("all",)),
        in_specs=(P(), P(), P("all")),
        out_specs=P(),
    )
    def step(state, weight, x):
        def loss(weight):
            return jax.lax.pmean(loss_of(weight, x), "all")

        found = ls.value_and_grad(loss, POLICY, axis_name="all")(state, weight)
        return found.grads, found.signal.finite, found.state

    weight = jnp.zeros((1, 4))
    grads, finite, _ = step(ls.init(POLICY), weight, rows())
    assert np.mean(rows() / 4, axis=0, keepdims=True).tolist() == grads.tolist()
    assert bool(finite)
    _, finite, state = step(ls.init(POLICY), weight, rows(np.nan))
    assert not bool(finite)
    assert 512.0 == state.scale


def test_an_axis_of_one_device_is_an_axis_too():
    mesh = jax.make_mesh(
        (1,), ("all",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
    )

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("all")), out_specs=P())
    def finite(state, grads):
        return ls.unscale(grads, state, axis_name="all")[1].finite

    assert bool(finite(ls.init(POLICY), jnp.ones(4)))


@pytest.mark.parametrize("bad", BAD)
def test_under_pmap_one_bad_device_makes_all_skip(bad):
    step = jax.pmap(
        partial(train_step, axis_name="all"), axis_name="all", in_axes=(None, None, 0)
    )
    state, weight, finite = step(ls.init(POLICY), jnp.zeros(4), rows(bad))
    assert [False] * 8 == finite.tolist()
    assert np.zeros((8, 4)).tolist() == weight.tolist()
    assert [512.0] * 8 == state.scale.tolist()


@pytest.mark.parametrize("bad", BAD)
def test_under_pmap_several_axes_skip_together(bad):
    names = ("devices", "lanes")
    inner = jax.vmap(
        partial(train_step, axis_name=names), axis_name="lanes", in_axes=(None, None, 0)
    )
    step = jax.pmap(inner, axis_name="devices", in_axes=(None, None, 0))
    grads = rows(bad).reshape(4, 2, 4)
    state, weight, finite = step(ls.init(POLICY), jnp.zeros(4), grads)
    assert [[False] * 2] * 4 == finite.tolist()
    assert np.zeros((4, 2, 4)).tolist() == weight.tolist()
    assert [[512.0] * 2] * 4 == state.scale.tolist()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("bad", BAD)
def test_under_jit_a_sharded_gradient_is_judged_as_a_whole(bad, kind):
    mesh = mesh_of(kind=kind)
    state = ls.init(POLICY)

    @jax.jit
    def step(state, weight, grads):
        unscaled, signal = ls.unscale(grads, state, measure=MEASURES)
        weight = ls.select(signal.finite, weight - unscaled, weight)
        return ls.update(POLICY, state, signal), weight, signal

    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(("data", "model")))
        weight = jax.device_put(jnp.zeros((8, 4)), sharding)
        grads = jax.device_put(rows(bad), sharding)
        after, kept, signal = step(state, weight, grads)
        assert not bool(signal.finite)
        assert np.isnan(bad) == bool(signal.nan)
        assert 32.0 == signal.amax
        assert not np.isfinite(signal.norm)
        assert 512.0 == after.scale
        assert kept.sharding.is_equivalent_to(sharding, 2)
        assert np.zeros((8, 4)).tolist() == np.asarray(kept).tolist()
        after, kept, signal = step(after, weight, jax.device_put(rows(), sharding))
        assert bool(signal.finite)
        assert (-rows() / 512).tolist() == np.asarray(kept).tolist()


@pytest.mark.parametrize("bad", BAD)
def test_measurements_of_all_devices_are_combined_and_no_nan_is_lost(bad):
    mesh = mesh_of((8,), ("all",))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("all")), out_specs=P())
    def look(state, grads):
        return ls.unscale(grads, state, axis_name="all", measure=MEASURES)[1]

    state = ls.init(Fixed(4.0))
    values = rows()
    values[0, :2] = 0.0
    values[7, 3] = 1e-42
    signal = look(state, values)
    assert bool(signal.finite)
    assert not bool(signal.nan)
    assert 31.0 == signal.amax
    norms = np.linalg.norm(values.astype(np.float64) / 4, axis=1)
    assert max(norms) == pytest.approx(float(signal.norm), rel=1e-6)
    assert (2 / 32, 1 / 32) == (signal.zero_fraction, signal.subnormal_fraction)
    for device in range(8):
        signal = look(state, rows(bad, device))
        assert not bool(signal.finite)
        assert np.isnan(bad) == bool(signal.nan)
        assert (np.isnan if np.isnan(bad) else np.isinf)(signal.norm)


def test_gradients_that_would_overflow_as_a_sum_are_an_overflow():
    """1e38 is finite on each of eight devices; added up it is not."""
    mesh = mesh_of((8,), ("all",))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("all")), out_specs=P())
    def look(state, grads):
        unscaled, signal = ls.unscale(grads, state, axis_name="all")
        mean = jnp.all(jnp.isfinite(jax.lax.pmean(unscaled, "all")))
        return signal.finite, mean

    state = ls.init(Fixed(1.0))
    assert (False, False) == tuple(map(bool, look(state, jnp.full(8, 1e38))))
    assert (True, True) == tuple(map(bool, look(state, jnp.full(8, 4e37))))


def test_the_flags_of_leaves_are_those_of_any_device():
    mesh = mesh_of((8,), ("all",))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("all"), out_specs=P())
    def flags(grads):
        return ls.leaf_flags(grads, axis_name="all")

    grads = {"a": rows(np.inf, 2), "b": rows(), "c": rows(np.nan, 7)}
    found = ls.bad_leaves(grads, flags(grads))
    assert {"['a']": "inf", "['c']": "nan"} == found


def test_retries_and_accumulation_agree_over_devices():
    mesh = mesh_of((8,), ("all",))
    policy = Dynamic(init_scale=2.0**16)

    def loss(weight, x):  # overflows in float16 where x is large
        return jnp.sum((weight.astype(jnp.float16) * x).astype(jnp.float32))

    def shard(function, out_specs):
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(P(), P(), P(None, "all")),
            out_specs=out_specs,
        )
        return jax.jit(mapped)

    def retry(state, weight, x):
        weight = jax.lax.pcast(weight, "all", to="varying")
        step = ls.value_and_grad(loss, policy, axis_name="all")
        found = ls.retrying(step, retries=8)(state, weight, x[0])
        return found.state, found.retries, found.grads

    def accumulate(state, weight, x):
        weight = jax.lax.pcast(weight, "all", to="varying")
        step = ls.accumulating(loss, policy, axis_name="all")
        found = step(state, weight, x)
        return found.state, found.used, found.grads

    x = np.ones((3, 8), np.float16)
    x[0, 6] = 8.0
    state, weight = ls.init(policy), jnp.ones(1)
    after, retries, grads = shard(retry, (P(), P(), P("all")))(state, weight, x)
    assert (2.0**12, 4) == (after.scale, retries)
    assert x[0].tolist() == grads.tolist()
    low = state._replace(scale=jnp.float32(2.0**13))
    after, used, grads = shard(accumulate, (P(), P(), P("all")))(low, weight, x)
    assert [False, True, True] == used.tolist()
    assert 2.0**12 == after.scale
    assert [1.0] * 8 == grads.tolist()
