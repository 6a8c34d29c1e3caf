"""Eight devices with shard_map, pmap and sharded jit; an overflow on one of them."""

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
NONFINITE = [np.inf, -np.inf, np.nan]


def make_mesh(shape=(4, 2), names=("data", "model"), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def make_rows(nonfinite=None, device=5):
    """Return one row of gradients for each device; one number may be non-finite."""
    values = np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4)
    if nonfinite is not None:
        values[device, 1] = nonfinite
    return values


def test_there_are_eight_devices():
    assert 8 == jax.device_count()


def compute_loss(weight, x):
    return jnp.mean(weight * x)


def train_step(state, weight, x, axis_name):
    """Return a data-parallel step: gradients averaged, one decision for all."""
    result = ls.value_and_grad(compute_loss, POLICY, axis_name=axis_name)(
        state, weight, x
    )
    grads = jax.lax.pmean(result.grads, axis_name)
    weight = ls.select(result.signal.finite, weight - grads, weight)
    return result.state, weight, result.signal.finite


@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "no check"])
@pytest.mark.parametrize("axes", ["all", ("data", "model")], ids=["one", "two"])
@pytest.mark.parametrize("value", NONFINITE)
def test_under_shard_map_an_overflow_on_one_device_skips_on_all(axes, checked, value):
    mesh = make_mesh((8,), ("all",)) if axes == "all" else make_mesh()

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P(axes)),
        out_specs=(P(), P(), P(axes)),
        check_vma=checked,
    )
    def step(state, weight, x):
        if checked:  # else JAX sums the gradients of a replicated weight itself
            weight = jax.lax.pcast(weight, axes, to="varying")
        state, weight, finite = train_step(state, weight, x, axes)
        return state, jax.lax.pmean(weight, axes), finite[None]

    state = ls.init(POLICY, device=NamedSharding(mesh, P()))
    weight = jnp.zeros((1, 4))
    state, after, finite = step(state, weight, make_rows(value))
    assert [False] * 8 == finite.tolist()
    assert np.zeros((1, 4)).tolist() == after.tolist()
    assert (512.0, 0, 0) == tuple(value.item() for value in state)
    state, after, finite = step(state, weight, make_rows())
    assert [True] * 8 == finite.tolist()
    expected = -np.mean(make_rows() / 4, axis=0, keepdims=True)
    assert expected.tolist() == after.tolist()
    assert (512.0, 1, 0) == tuple(value.item() for value in state)
    assert 1 == step._cache_size()


def test_under_shard_map_gradients_that_jax_has_summed_need_no_reduction():
    """A replicated weight's gradient is the same everywhere already."""

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh((8,), ("all",)),
        in_specs=(P(), P(), P("all")),
        out_specs=P(),
    )
    def step(state, weight, x):
        def loss(weight):
            return jax.lax.pmean(compute_loss(weight, x), "all")

        result = ls.value_and_grad(loss, POLICY, axis_name="all")(state, weight)
        return result.grads, result.signal.finite, result.state

    weight = jnp.zeros((1, 4))
    grads, finite, _ = step(ls.init(POLICY), weight, make_rows())
    assert np.mean(make_rows() / 4, axis=0, keepdims=True).tolist() == grads.tolist()
    assert bool(finite)
    _, finite, state = step(ls.init(POLICY), weight, make_rows(np.nan))
    assert not bool(finite)
    assert 512.0 == state.scale


def test_an_axis_may_have_one_device():
    mesh = jax.make_mesh(
        (1,), ("all",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
    )

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("all")), out_specs=P())
    def finite(state, grads):
        return ls.unscale(grads, state, axis_name="all")[1].finite

    assert bool(finite(ls.init(POLICY), jnp.ones(4)))


@pytest.mark.parametrize("value", NONFINITE)
def test_under_pmap_an_overflow_on_one_device_skips_on_all(value):
    step = jax.pmap(
        partial(train_step, axis_name="all"), axis_name="all", in_axes=(None, None, 0)
    )
    state, weight, finite = step(ls.init(POLICY), jnp.zeros(4), make_rows(value))
    assert [False] * 8 == finite.tolist()
    assert np.zeros((8, 4)).tolist() == weight.tolist()
    assert [512.0] * 8 == state.scale.tolist()


@pytest.mark.parametrize("value", NONFINITE)
def test_under_pmap_several_axes_skip_together(value):
    names = ("devices", "batch")
    inner = jax.vmap(
        partial(train_step, axis_name=names), axis_name="batch", in_axes=(None, None, 0)
    )
    step = jax.pmap(inner, axis_name="devices", in_axes=(None, None, 0))
    grads = make_rows(value).reshape(4, 2, 4)
    state, weight, finite = step(ls.init(POLICY), jnp.zeros(4), grads)
    assert [[False] * 2] * 4 == finite.tolist()
    assert np.zeros((4, 2, 4)).tolist() == weight.tolist()
    assert [[512.0] * 2] * 4 == state.scale.tolist()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("value", NONFINITE)
def test_under_jit_a_sharded_gradient_is_checked_globally(value, kind):
    mesh = make_mesh(kind=kind)
    state = ls.init(POLICY)

    @jax.jit
    def step(state, weight, grads):
        unscaled, signal = ls.unscale(grads, state, measure=MEASURES)
        weight = ls.select(signal.finite, weight - unscaled, weight)
        return ls.update(POLICY, state, signal), weight, signal

    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(("data", "model")))
        weight = jax.device_put(jnp.zeros((8, 4)), sharding)
        grads = jax.device_put(make_rows(value), sharding)
        after, kept, signal = step(state, weight, grads)
        assert not bool(signal.finite)
        assert np.isnan(value) == bool(signal.nan)
        assert 32.0 == signal.amax
        assert not np.isfinite(signal.norm)
        assert 512.0 == after.scale
        assert kept.sharding.is_equivalent_to(sharding, 2)
        assert np.zeros((8, 4)).tolist() == np.asarray(kept).tolist()
        after, kept, signal = step(after, weight, jax.device_put(make_rows(), sharding))
        assert bool(signal.finite)
        assert (-make_rows() / 512).tolist() == np.asarray(kept).tolist()


@pytest.mark.parametrize("value", NONFINITE)
def test_measurements_of_all_devices_are_combined_and_no_nan_is_lost(value):
    mesh = make_mesh((8,), ("all",))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("all")), out_specs=P())
    def measure(state, grads):
        return ls.unscale(grads, state, axis_name="all", measure=MEASURES)[1]

    state = ls.init(Fixed(4.0))
    values = make_rows()
    values[0, :2] = 0.0
    values[7, 3] = 1e-42
    signal = measure(state, values)
    assert bool(signal.finite)
    assert not bool(signal.nan)
    assert 31.0 == signal.amax
    norms = np.linalg.norm(values.astype(np.float64) / 4, axis=1)
    assert max(norms) == pytest.approx(float(signal.norm), rel=1e-6)
    assert (2 / 32, 1 / 32) == (signal.zero_fraction, signal.subnormal_fraction)
    for device in range(8):
        signal = measure(state, make_rows(value, device))
        assert not bool(signal.finite)
        assert np.isnan(value) == bool(signal.nan)
        assert (np.isnan if np.isnan(value) else np.isinf)(signal.norm)


def test_gradients_whose_sum_cannot_be_squared_are_too_large():
    mesh = make_mesh((8,), ("all",))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("all")), out_specs=P())
    def check(state, grads):
        _, signal = ls.unscale(grads, state, axis_name="all")
        total = jax.lax.psum(grads, "all")
        return signal.finite, signal.too_large, jnp.all(jnp.isfinite(total**2))

    state = ls.init(Fixed(1.0))
    assert [False, True, False] == [*map(bool, check(state, jnp.full(8, 2.4e18)))]
    assert [True, False, True] == [*map(bool, check(state, jnp.full(8, 2.2e18)))]


@pytest.mark.parametrize(("overflows", "scale"), [(False, 8.0), (True, 4.0)])
def test_one_device_with_a_gradient_that_is_too_large_skips_on_all(overflows, scale):
    mesh = make_mesh((8,), ("all",))
    policy = Dynamic(init_scale=8.0)
    grads = np.ones(8, np.float32)
    grads[3] = 3e38
    grads[5] = np.inf if overflows else 1.0

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("all")), out_specs=P())
    def check(state, grads):
        unscaled, signal = ls.unscale(grads, state, axis_name="all")
        flags = ls.leaf_flags(unscaled, axis_name="all")
        return signal, ls.update(policy, state, signal), flags

    signal, state, flags = check(ls.init(policy), grads)
    assert (False, not overflows) == (bool(signal.finite), bool(signal.too_large))
    assert scale == state.scale
    expected = "inf" if overflows else "too large"
    assert {"": expected} == ls.nonfinite_leaves(grads, flags)


def test_leaf_flags_are_combined_over_devices():
    mesh = make_mesh((8,), ("all",))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("all"), out_specs=P())
    def flags(grads):
        return ls.leaf_flags(grads, axis_name="all")

    grads = {"a": make_rows(np.inf, 2), "b": make_rows(), "c": make_rows(np.nan, 7)}
    result = ls.nonfinite_leaves(grads, flags(grads))
    assert {"['a']": "inf", "['c']": "nan"} == result


def test_retries_and_accumulation_make_one_decision_over_devices():
    mesh = make_mesh((8,), ("all",))
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
        result = ls.with_retries(step, retries=8)(state, weight, x[0])
        return result.state, result.retries, result.grads

    def accumulate(state, weight, x):
        weight = jax.lax.pcast(weight, "all", to="varying")
        step = ls.accumulate_gradients(loss, policy, axis_name="all")
        result = step(state, weight, x)
        return result.state, result.used, result.grads

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
