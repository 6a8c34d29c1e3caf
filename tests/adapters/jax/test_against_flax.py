"""compat.flax against flax's own DynamicScale, including the defects of flax."""

import random

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
dynamic_scale = pytest.importorskip(
    "flax.training.dynamic_scale", reason="flax is not installed"
)
jnp = jax.numpy

from flax import serialization, struct  # noqa: E402
from helpers.sequences import draw, overflow_pattern  # noqa: E402
from helpers.trees import check_same  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Signal  # noqa: E402
from lossscale.errors import LossScaleError  # noqa: E402
from lossscale.jax.compat import flax as compat_flax  # noqa: E402

FIELDS = [
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "fin_steps",
    "scale",
    "minimum_scale",
]


# flax counts with Python numbers.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def make_both(**settings):
    """Return the same scale from flax, with arrays as leaves, and from compat.flax."""
    leaves = {
        "fin_steps": jnp.int32(settings.pop("fin_steps", 0)),
        "scale": jnp.float32(settings.pop("scale", 65536.0)),
    }
    return (
        dynamic_scale.DynamicScale(**settings, **leaves),
        compat_flax.DynamicScale(**settings, **leaves),
    )


@jax.jit
def run_compiled(scaler, flags):
    """Return everything that value_and_grad returns, after each step."""

    def step(current, finite):
        def loss(weight):
            return weight * jnp.where(finite, 3.0, jnp.inf)

        after, ok, value, grad = current.value_and_grad(loss)(jnp.float32(0.5))
        # Values of an overflow are not compared: flax's loss was scaled.
        value, grad = (jnp.where(ok, x, 0.0) for x in (value, grad))
        return after, (after.scale, after.fin_steps, ok, value, grad)

    return jax.lax.scan(step, scaler, flags)[1]


def test_random_sequences_give_the_same_steps():
    rng = random.Random(21)
    for growth, backoff in ((2.0, 0.5), (4.0, 0.25), (2.0, 0.125)):
        for interval in (1, 2, 5):
            for _ in range(20):
                config = draw(
                    rng,
                    scale=(1.0, 65536.0, 2.0**-100, 2.0**120),
                    minimum_scale=(2.0**-126, 1.0, 2.0**-10),
                )
                theirs, ours = make_both(
                    growth_factor=growth,
                    backoff_factor=backoff,
                    growth_interval=interval,
                    **config,
                )
                flags = jnp.asarray(overflow_pattern(rng, 40))
                check_same(run_compiled(theirs, flags), run_compiled(ours, flags))


def test_factors_that_are_no_powers_of_two_agree_to_the_last_digits():
    rng = random.Random(22)
    for _ in range(10):
        theirs, ours = make_both(
            growth_factor=1.7, backoff_factor=0.8, growth_interval=2, scale=3.0
        )
        flags = jnp.asarray(overflow_pattern(rng, 40))
        expected, actual = run_compiled(theirs, flags), run_compiled(ours, flags)
        check_same(expected[:3], actual[:3])
        # flax divides by the scale, we multiply by its reciprocal.
        np.testing.assert_allclose(expected[4], actual[4], rtol=3e-7)


def test_fields_and_defaults_are_flaxs():
    theirs, ours = dynamic_scale.DynamicScale(), compat_flax.DynamicScale()
    assert FIELDS == list(theirs.__dataclass_fields__)
    assert FIELDS == list(ours.__dataclass_fields__)
    assert [getattr(theirs, n) for n in FIELDS] == [getattr(ours, n) for n in FIELDS]
    assert dynamic_scale.DynamicScaleResult._fields == (
        compat_flax.DynamicScaleResult._fields
    )
    assert 4.0 == ours.replace(scale=4.0).scale
    assert 65536.0 == ours.scale
    assert [0, 65536.0] == jax.tree.leaves(ours)


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_value_and_grad_returns_what_flaxs_does(argnums, has_aux):
    def loss(a, b):
        value = jnp.sum(a["w"] ** 2) * b
        return (value, {"seen": b}) if has_aux else value

    a, b = {"w": jnp.array([1.0, 2.0])}, jnp.float32(3.0)
    expected, actual = (
        jax.jit(scaler.value_and_grad(loss, argnums, has_aux))(a, b)
        for scaler in make_both()
    )
    check_same(expected[1:], actual[1:])
    check_same(expected[0].scale, actual[0].scale)


def test_gradients_are_averaged_over_an_axis_before_they_are_checked():
    mesh = Mesh(np.array(jax.devices()[:8]), "data")
    data = np.arange(8, dtype=np.float32)
    for overflow in (False, True):
        values = np.where(np.arange(8) == 5, np.inf, data) if overflow else data
        x = jnp.asarray(values)

        def step(scaler, weight, x):
            weight = jax.lax.pcast(weight, "data", to="varying")
            grad = scaler.value_and_grad(lambda w: w * x[0], axis_name="data")
            after, ok, _, grads = grad(weight)
            return after.scale, after.fin_steps, ok, grads

        mapped = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
                out_specs=PartitionSpec(),
            )
        )
        expected, actual = (mapped(s, jnp.float32(1.0), x) for s in make_both())
        check_same(expected, actual)
        assert overflow is not bool(actual[2])


def test_dynamic_grows_after_the_interval_and_flaxs_one_step_later():
    def changes(scales):
        return [i for i in range(1, len(scales)) if scales[i] != scales[i - 1]]

    flags = jnp.ones(12, bool)
    for scaler in make_both(growth_interval=4):
        scales = [65536.0, *run_compiled(scaler, flags)[0].tolist()]
        assert [5, 10] == changes(scales)
    policy = Dynamic(growth_interval=4)
    state, scales = ls.init(policy), [65536.0]
    for _ in range(12):
        state = ls.update(policy, state, Signal(finite=True))
        scales.append(float(state.scale))
    assert [4, 8, 12] == changes(scales)


def test_a_default_scale_is_compiled_once_where_flaxs_is_compiled_twice():
    compiles = []
    for scaler in (dynamic_scale.DynamicScale(), compat_flax.DynamicScale()):
        step = jax.jit(lambda s, w: s.value_and_grad(jnp.square)(w)[0])
        current = scaler
        for _ in range(3):
            current = step(current, jnp.float32(1.0))
        compiles.append(step._cache_size())
    assert [2, 1] == compiles


def test_the_loss_of_an_overflow_is_the_one_that_was_computed():
    theirs, ours = make_both(scale=2.0**120)

    def loss(weight):
        return weight * 1e10

    expected, actual = (
        s.value_and_grad(loss)(jnp.float32(1.0)) for s in (theirs, ours)
    )
    assert np.isinf(expected.aux)
    assert 1e10 == actual.aux
    assert not expected.finite
    assert not actual.finite


def test_a_loss_in_half_precision_is_upcast():
    result = compat_flax.DynamicScale(scale=64.0).value_and_grad(
        lambda w: w.astype(jnp.float16) * 1000
    )(jnp.float32(2.0))
    assert (2000.0, 1000.0, True) == (result.aux, result.grad, result.finite)
    assert jnp.float32 == result.aux.dtype == result.grad.dtype


def test_keywords_reach_the_function():
    result = compat_flax.DynamicScale().value_and_grad(lambda w, *, factor: w * factor)(
        jnp.float32(2.0), factor=jnp.float32(3.0)
    )
    assert (6.0, 3.0) == (result.aux, result.grad)


def test_the_scale_stays_finite_however_long_it_grows():
    # flax's issue 2547.
    scaler = compat_flax.DynamicScale(growth_factor=10.0, growth_interval=1)
    scales = run_compiled(scaler, jnp.ones(140, bool))[0]
    assert np.isfinite(scales).all()
    down = run_compiled(
        compat_flax.DynamicScale(minimum_scale=None), jnp.zeros(200, bool)
    )[0]
    assert 2.0**-126 == down[-1]


def test_invalid_settings_are_refused_at_construction():
    for settings in (
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"minimum_scale": float("inf")},
    ):
        with pytest.raises(LossScaleError):
            compat_flax.DynamicScale(**settings)


def test_flax_saves_and_restores_ours_as_its_own():
    theirs, ours = make_both(fin_steps=3, scale=128.0)
    saved = serialization.to_state_dict(theirs)
    assert saved == serialization.to_state_dict(ours)
    fresh = compat_flax.DynamicScale(growth_interval=7)
    restored = serialization.from_state_dict(fresh, saved)
    assert (3, 128.0, 7) == (
        restored.fin_steps,
        restored.scale,
        restored.growth_interval,
    )
    again = serialization.from_bytes(fresh, serialization.to_bytes(ours))
    check_same(ours.replace(growth_interval=7), again)


def test_a_train_state_of_flax_contains_it_and_is_saved_with_it():
    @struct.dataclass
    class State:
        weight: jax.Array
        scaler: compat_flax.DynamicScale

    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        scaler, ok, _, grad = state.scaler.value_and_grad(jnp.square)(state.weight)
        weight = jnp.where(ok, state.weight - 0.1 * grad, state.weight)
        return state.replace(weight=weight, scaler=scaler)

    fresh = State(jnp.float32(1.0), compat_flax.DynamicScale(growth_interval=2))
    state = fresh
    for _ in range(4):
        state = step(state)
    assert 131072.0 == state.scaler.scale
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    check_same(step(state), step(restored))
    assert [1] == traces
