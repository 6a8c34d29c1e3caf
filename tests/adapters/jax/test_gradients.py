"""Gradients of every dtype, their measurements, and reports of non-finite leaves."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Fixed, ScaleState, Signal  # noqa: E402
from lossscale.errors import (  # noqa: E402
    GradientError,
    SettingError,
    StructureError,
)

KEY = jax.random.key(0)
NAMES = ("nan", "amax", "norm", "zero_fraction", "subnormal_fraction")


def make_state(scale):
    return ls.init(Fixed(scale))


def measure(grads, scale=1.0, names=NAMES):
    run = jax.jit(lambda tree, s: ls.unscale(tree, s, measure=names)[1])
    return run(grads, make_state(scale))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_narrow_gradients_become_float32(dtype):
    grads, signal = ls.unscale([jnp.array([1.5, -3.0], dtype)], make_state(4.0))
    assert ("float32", [0.375, -0.75]) == (str(grads[0].dtype), grads[0].tolist())
    assert bool(signal.finite)
    nonfinite = jnp.array([1.0, jnp.nan], dtype)
    assert not bool(ls.unscale([nonfinite], make_state(4.0))[1].finite)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("size", [1, 7, 64, 4099, 70_001])
def test_one_nonfinite_number_is_found_at_any_index(size, value):
    """XLA's maximum drops a NaN in the middle of a vector on some processors."""
    run = jax.jit(lambda x, s: ls.unscale(x, s, measure=("norm", "nan"))[1])
    for index in {0, size // 3, size // 2, size - 1}:
        values = np.ones(size, np.float32)
        values[index] = value
        signal = run(values, make_state(2.0))
        assert not bool(signal.finite)
        assert np.isnan(value) == bool(signal.nan)
        assert (np.isnan if np.isnan(value) else np.isinf)(signal.norm)


@pytest.mark.parametrize("scale", [np.inf, 2.0**127, 0.0, np.nan])
def test_a_scale_without_a_usable_reciprocal_is_an_overflow(scale):
    """All gradients would be 0, and every step finite."""
    broken = ScaleState(jnp.float32(scale), jnp.int32(0), jnp.int32(0))
    _, signal = jax.jit(ls.unscale)([jnp.ones(2)], broken)
    assert not bool(signal.finite)


@pytest.mark.parametrize("magnitude", [1e25, 3e38, 1.0, 1e-25, 1e-37])
def test_a_norm_is_right_where_squares_leave_float32(magnitude):
    rng = np.random.default_rng(0)
    values = [(rng.random(n) * magnitude).astype(np.float32) for n in (5, 1000)]
    exact = np.sqrt(sum(np.sum(v.astype(np.float64) ** 2) for v in values))
    if exact > np.finfo(np.float32).max:
        values = [v / 64 for v in values]
        exact /= 64
    assert exact == pytest.approx(float(measure(values).norm), rel=1e-6)


def test_a_norm_of_numbers_of_every_size_is_right():
    values = np.array([1e20, 1e16, 3.0, 1e-16, 1e-30])
    run = jax.jit(lambda x, s: ls.unscale(x, s, measure="norm")[1])
    unit = make_state(1.0)
    for keep in range(1, 32):
        subset = values * [keep >> index & 1 for index in range(5)]
        exact = np.linalg.norm(subset)
        assert exact == pytest.approx(
            float(run(subset.astype(np.float32), unit).norm), rel=1e-6
        )


def test_measurements_without_a_gradient_are_zero():
    signal = measure({"a": None, "b": []})
    assert (True, False, 0, 0, 0, 0) == (
        bool(signal.finite),
        bool(signal.nan),
        signal.amax,
        signal.norm,
        signal.zero_fraction,
        signal.subnormal_fraction,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_subnormal_numbers_are_distinguished_from_zeros_in_every_dtype(dtype):
    tiny = float(jnp.finfo(dtype).smallest_normal)
    values = np.array([tiny, 0.0, 1.0, -0.0], jnp.dtype(dtype))
    values[2] = np.nextafter(np.float64(tiny) / 2, 0)
    signal = measure([values])
    assert (0.5, 0.25) == (signal.zero_fraction, signal.subnormal_fraction)


def test_a_complex_gradient_is_measured_as_two_numbers():
    signal = measure([np.array([3 + 4j, 0], np.complex64)])
    assert (4.0, 5.0, 0.5) == (signal.amax, signal.norm, signal.zero_fraction)


def test_the_largest_value_of_a_float64_gradient_stays_finite():
    with jax.enable_x64(True):
        signal = measure([np.array([1e300, 1.0]), np.ones(2, np.float32)])
        assert (1e300, "float64") == (signal.amax, str(signal.amax.dtype))
        assert 1e300 == signal.norm


def test_python_numbers_are_accepted_as_losses_and_gradients():
    assert 8.0 == ls.scale(1, make_state(8.0))
    assert 4.0 == ls.scale(0.5, make_state(8.0))
    assert np.inf == ls.scale(10**300, make_state(8.0))
    assert -np.inf == ls.scale(-(10**400), make_state(8.0))
    assert 0.25 == ls.unscale([2.0], make_state(8.0))[0][0]


@pytest.mark.parametrize("wrong", [np.int32(3), True, "3", 1j])
def test_a_loss_that_is_no_real_float_is_refused(wrong):
    with pytest.raises(GradientError, match="The loss is"):
        ls.scale(wrong, make_state(8.0))


def test_a_key_among_gradients_is_reported():
    with pytest.raises(GradientError, match=r"\['key'\] is key<fry>"):
        ls.unscale({"key": KEY}, make_state(8.0))


def test_passthrough_decides_which_leaves_pass_through():
    grads = {"w": jnp.array([8.0]), "table": jnp.array([3])}
    unscaled, signal = ls.unscale(
        grads, make_state(4.0), passthrough=lambda path, leaf: leaf.dtype == jnp.int32
    )
    assert unscaled["table"] is grads["table"]
    assert [2.0] == unscaled["w"].tolist()
    assert bool(signal.finite)


def test_the_loss_is_checked_if_it_is_passed():
    _, signal = ls.unscale([jnp.ones(2)], make_state(4.0), loss=jnp.float32(jnp.nan))
    assert (True, False) == (bool(signal.finite), bool(signal.loss_finite))


def test_one_measurement_may_be_named_without_a_list():
    assert 2.0 == measure([np.ones(4, np.float32)], names="norm").norm
    with pytest.raises(SettingError, match="Cannot measure"):
        measure([], names="norms")


@pytest.mark.parametrize(
    "wrong",
    [np.isfinite(np.ones(3)), [], np.array([True]), jnp.ones(2), object(), 1j, KEY],
    ids=["elementwise", "empty", "one in a row", "array", "object", "complex", "key"],
)
def test_an_invalid_flag_never_updates_the_state(wrong):
    with pytest.raises(GradientError, match="one boolean"):
        ls.update(Dynamic(), make_state(8.0), Signal(wrong))


def test_flags_of_any_boolean_type_are_accepted():
    policy = Dynamic()
    for true in (True, np.True_, np.array(True), jnp.bool_(True), 1):
        after = ls.update(policy, ls.init(policy), Signal(true))
        assert (65536.0, 1, 0) == tuple(value.item() for value in after)


def test_nonfinite_leaves_are_reported_with_the_reason():
    grads = {
        "dense": [{"kernel": jnp.array([1.0, -jnp.inf]), "bias": jnp.ones(2)}],
        "head": jnp.array([jnp.inf, jnp.nan], jnp.float16),
        "none": None,
        "norm": jnp.array([1.0, 3e38]),
        "tail": jnp.array([-jnp.inf, 3e38]),
        "_overwrite_with_gradient": jnp.array([jnp.nan]),
    }
    flags = jax.jit(ls.leaf_flags)(grads)
    expected = {
        "['dense'][0]['kernel']": "inf",
        "['head']": "nan",
        "['norm']": "too large",
        "['tail']": "inf",
    }
    assert expected == ls.nonfinite_leaves(grads, flags)
    assert {} == ls.nonfinite_leaves({}, ls.leaf_flags({}))
    with pytest.raises(StructureError, match="5 gradients"):
        ls.nonfinite_leaves(grads, ls.leaf_flags([jnp.ones(2)]))


def test_leaf_flags_need_no_further_read_under_jit():
    """`finite` needs the same reductions: XLA computes them once."""

    def plain(grads, s):
        return ls.unscale(grads, s, measure="nan")

    def flagged(grads, s):
        unscaled, signal = ls.unscale(grads, s, measure="nan")
        flags = ls.leaf_flags(unscaled)
        return unscaled, signal, (flags.finite, flags.too_large)

    grads = [jnp.ones(4096), jnp.ones((64, 64))]
    counts = [
        jax.jit(f).lower(grads, make_state(2.0)).compile().as_text().count(" reduce(")
        for f in (plain, flagged)
    ]
    assert counts[0] == counts[1]


def test_nothing_is_compiled_again_outside_of_jit():
    """JAX compiled the reduction at every call: a second for four gradients."""
    compiled = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            compiled.append(duration)

    grads = [jnp.ones((3, n)) for n in range(1, 5)]
    ls.unscale(grads, make_state(2.0))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        ls.unscale(grads, make_state(2.0))
        assert [] == compiled
        jax.jit(lambda x: x * 2.0 + 3.0)(jnp.ones(7))
        assert compiled  # the listener is called on a compilation
    finally:
        jax.monitoring.clear_event_listeners()
