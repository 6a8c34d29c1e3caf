"""compat.jmp against jmp itself, including the defects of jmp."""

import random
from dataclasses import replace

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
jmp = pytest.importorskip("jmp", reason="jmp is not installed")
jnp = jax.numpy

from helpers.sequences import draw, overflow_pattern  # noqa: E402
from helpers.trees import check_same  # noqa: E402

from lossscale.errors import (  # noqa: E402
    GradientError,
    LossScaleError,
    SettingError,
    StructureError,
)
from lossscale.jax.compat import jmp as compat_jmp  # noqa: E402

TRUE, FALSE = jnp.bool_(True), jnp.bool_(False)


# jmp multiplies int32 by bool.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def make_both(*args, **kwargs):
    """Return the same scale from jmp and from compat.jmp."""
    return (
        jmp.DynamicLossScale(*args, **kwargs),
        compat_jmp.DynamicLossScale(*args, **kwargs),
    )


@jax.jit
def run_compiled(scaler, flags):
    """Return scale and counter after each step."""

    def step(current, finite):
        after = current.adjust(finite)
        return after, (after.loss_scale, after.counter)

    return jax.lax.scan(step, scaler, flags)[1]


def run_eager(scaler, flags):
    """The same without jit, which turns a division by a constant into a product."""
    states = []
    for flag in flags:
        scaler = scaler.adjust(flag)
        states.append((float(scaler.loss_scale), int(scaler.counter)))
    return states


def test_random_sequences_give_the_same_steps():
    rng = random.Random(11)
    for factor in (2, 4):
        for period in (1, 2, 5):
            for _ in range(25):
                config = draw(rng, loss_scale=(1.0, 3.0, 7.3, 2.0**15, 1e30, 3e38))
                first = jnp.float32(config["loss_scale"])
                flags = jnp.asarray(overflow_pattern(rng, 48))
                theirs, ours = make_both(first, period=period, factor=factor)
                check_same(run_compiled(theirs, flags), run_compiled(ours, flags))


def test_random_sequences_with_any_factor_and_minimum_agree_without_jit():
    rng = random.Random(12)
    for _ in range(25):
        config = draw(
            rng,
            period=(1, 2, 3),
            factor=(2, 3, 1.5),
            min_loss_scale=(1.0, 0.25, 2.0**-20, 100.0),
        )
        config["min_loss_scale"] = jnp.float32(config["min_loss_scale"])
        first = jnp.float32(rng.choice((0.5, 3.0, 2.0**15)))
        flags = [jnp.bool_(flag) for flag in overflow_pattern(rng, 12)]
        theirs, ours = make_both(first, **config)
        assert run_eager(theirs, flags) == run_eager(ours, flags)


def test_the_minimum_survives_transformations_that_drop_jmps():
    theirs, ours = make_both(jnp.float32(1.0), min_loss_scale=jnp.float32(0.25))
    through = {
        "jit": jax.jit(lambda scaler: scaler),
        "tree_map": lambda scaler: jax.tree.map(lambda leaf: leaf, scaler),
        "scan": lambda s: jax.lax.scan(lambda c, _: (c, None), s, None, length=1)[0],
        "flatten": lambda s: jax.tree.unflatten(*jax.tree.flatten(s)[::-1]),
    }
    for name, passed in through.items():
        assert 1.0 == passed(theirs).adjust(FALSE).loss_scale, name
        assert 0.5 == passed(ours).adjust(FALSE).loss_scale, name
        assert 0.25 == passed(ours).min_loss_scale, name


def test_a_scale_in_half_precision_is_adjusted_where_jmp_raises():
    theirs, ours = make_both(jnp.float16(2.0**15), period=1)
    with pytest.raises(TypeError, match="same dtypes"):
        theirs.adjust(FALSE)
    lower = ours.adjust(FALSE)
    assert (2.0**14, jnp.float16) == (lower.loss_scale, lower.loss_scale.dtype)
    # float16 has no 2**16, and no half of its smallest number.
    assert 2.0**15 == ours.adjust(TRUE).loss_scale
    least = compat_jmp.DynamicLossScale(jnp.float16(2.0**-24), min_loss_scale=0.0)
    assert 2.0**-24 == least.adjust(FALSE).loss_scale


def test_ahead_of_time_compilation_knows_its_arguments_where_jmps_raises():
    # JAX replaces each leaf by a description, which jmp's constructor inspects.
    theirs, ours = make_both(jnp.float32(1.0))
    step = jax.jit(lambda scaler: scaler.adjust(FALSE))
    with pytest.raises(TypeError):
        step.lower(theirs)
    ((scaler,), _) = step.lower(ours).args_info
    assert jnp.float32 == scaler.loss_scale.dtype


def test_scaling_and_unscaling_are_jmps():
    rng = np.random.default_rng(0)
    tree = {"a": jnp.asarray(rng.normal(size=5), jnp.float32), "b": None}
    for value in (2.0, 3.0, 4.0, 2.0**15):
        theirs, ours = make_both(jnp.float32(value))
        check_same(theirs.scale(tree), ours.scale(tree))
        check_same(theirs.unscale(tree), ours.unscale(tree))
        static = jmp.StaticLossScale(jnp.float32(value))
        check_same(static.scale(tree), compat_jmp.StaticLossScale(value).scale(tree))
        check_same(
            static.unscale(tree), compat_jmp.StaticLossScale(value).unscale(tree)
        )


def test_half_precision_is_scaled_and_unscaled_in_float32():
    tree = jnp.array([1.0, 2.0**-20], jnp.float16)
    theirs, ours = make_both(jnp.float32(2.0**15))
    check_same(theirs.scale(tree), ours.scale(tree))
    check_same(theirs.unscale(tree), ours.unscale(tree))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int8"])
@pytest.mark.parametrize(
    "scale",
    [8, 8.0, np.float16(8.0), jnp.bfloat16(8.0), jnp.float16(8.0), jnp.float32(8.0)],
    ids=lambda scale: f"{type(scale).__name__} {getattr(scale, 'dtype', '')}",
)
@pytest.mark.parametrize("kind", ["StaticLossScale", "DynamicLossScale"])
def test_unscaled_leaves_have_the_dtypes_of_jmp(kind, scale, dtype):
    if kind == "DynamicLossScale" and not hasattr(scale, "dtype"):
        scale = jnp.float32(scale)  # jmp's own changes its dtype after a step
    tree = {"a": jnp.array([64, 16], dtype), "b": None}
    theirs, ours = (getattr(names, kind)(scale) for names in (jmp, compat_jmp))
    check_same(theirs.unscale(tree), ours.unscale(tree))
    if dtype.startswith("int"):
        check_same(theirs.scale(tree), ours.scale(tree))


def test_a_training_step_in_float16_alone_runs():
    """`p - 0.1 * g` became float32, and select_tree refused it."""
    scaler = compat_jmp.DynamicLossScale(jnp.float16(2.0**10))
    params = jnp.ones(2, jnp.float16)

    @jax.jit
    def step(params, scaler):
        grads = jax.grad(lambda p: scaler.scale(jnp.sum(p * p)))(params)
        grads = scaler.unscale(grads)
        finite = compat_jmp.all_finite(grads)
        new = compat_jmp.select_tree(finite, params - 0.25 * grads, params)
        return new, scaler.adjust(finite)

    params, scaler = step(params, scaler)
    assert (jnp.float16, [0.5, 0.5]) == (params.dtype, params.tolist())


def test_a_static_scale_may_be_traced():
    def scaled(scale, x):
        scaler = compat_jmp.StaticLossScale(scale)
        return scaler.unscale(scaler.scale(x)), scaler.adjust(TRUE).loss_scale

    again, scale = jax.jit(scaled)(8.0, jnp.float32(3.0))
    assert (3.0, 8.0) == (again, scale)


def test_integer_scales_give_the_warning_of_jmp():
    for names in (jmp, compat_jmp):
        with pytest.warns(UserWarning, match="Expected floating type for loss_scale"):
            names.DynamicLossScale(jnp.int32(8))
        with pytest.warns(UserWarning, match="Expected floating type for min_loss"):
            names.DynamicLossScale(jnp.float32(8.0), min_loss_scale=jnp.int32(1))


def test_a_scale_has_two_leaves_and_equals_itself_after_a_map():
    theirs, ours = make_both(jnp.float32(8.0), jnp.int32(3), period=5, factor=4)
    assert jax.tree.leaves(theirs) == jax.tree.leaves(ours) == [8.0, 3]
    assert ours == jax.tree.map(lambda leaf: leaf, ours)
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(ours)
    ]
    assert [".loss_scale", ".counter"] == paths


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("period", [20, 30])
def test_a_counter_counts_to_the_period_and_starts_again(period, factor):
    scaler = compat_jmp.DynamicLossScale(
        jnp.float32(10.0), period=period, factor=factor
    )
    for step in range(1, period):
        scaler = scaler.adjust(TRUE)
        assert (10.0, step) == (scaler.loss_scale, scaler.counter)
    scaler = scaler.adjust(TRUE)
    assert (10.0 * factor, 0) == (scaler.loss_scale, scaler.counter)


def test_a_minimum_of_zero_stops_at_the_smallest_normal_number():
    scaler = compat_jmp.DynamicLossScale(jnp.float32(1.0), min_loss_scale=0.0)
    run = jax.jit(lambda s: jax.lax.fori_loop(0, 200, lambda _, c: c.adjust(FALSE), s))
    assert 2.0**-126 == run(scaler).loss_scale


def test_a_scale_starts_as_an_array_and_is_compiled_once():
    scaler = compat_jmp.DynamicLossScale(2.0**15)
    step = jax.jit(lambda s, f: s.adjust(f))
    for flag in (TRUE, FALSE, TRUE):
        scaler = step(scaler, flag)
    assert 1 == step._cache_size()
    assert (jnp.float32, jnp.int32) == (scaler.loss_scale.dtype, scaler.counter.dtype)


def test_elements_of_a_vmap_are_adjusted_separately():
    scalers = jax.vmap(compat_jmp.DynamicLossScale)(jnp.array([8.0, 16.0]))
    after = jax.vmap(lambda s, f: s.adjust(f))(scalers, jnp.array([True, False]))
    assert [8.0, 8.0] == after.loss_scale.tolist()
    assert [1, 0] == after.counter.tolist()


def test_the_static_scales_have_no_leaves_and_work_under_jit():
    for scaler in (compat_jmp.NoOpLossScale(), compat_jmp.StaticLossScale(8)):
        assert [] == jax.tree.leaves(scaler)
        assert scaler == jax.jit(lambda s: s.adjust(FALSE))(scaler)
        assert scaler is scaler.adjust(TRUE)
    assert (1, 8.0) == (
        compat_jmp.NoOpLossScale().loss_scale,
        compat_jmp.StaticLossScale(jnp.float32(8.0)).loss_scale,
    )


def test_no_op_returns_the_same_object():
    tree = {"a": object()}
    scaler = compat_jmp.NoOpLossScale()
    assert tree is scaler.scale(tree)
    assert tree is scaler.unscale(tree)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        jnp.ones(3),
        jnp.array([1.0, jnp.inf]),
        {"a": jnp.ones(2), "b": jnp.array(jnp.nan), "c": None},
        {"a": jnp.arange(3), "b": jnp.ones(2, jnp.float16)},
    ],
)
def test_all_finite_is_jmps(tree):
    check_same(jmp.all_finite(tree), compat_jmp.all_finite(tree))


def test_select_tree_is_jmps():
    a, b = {"x": jnp.ones(2), "y": None}, {"x": jnp.zeros(2), "y": None}
    for flag in (TRUE, FALSE):
        check_same(jmp.select_tree(flag, a, b), compat_jmp.select_tree(flag, a, b))
        under_jit = jax.jit(compat_jmp.select_tree)(flag, a, b)
        check_same(jmp.select_tree(flag, a, b), under_jit)
    nan = {"x": jnp.full(2, jnp.nan), "y": None}
    check_same(jmp.select_tree(TRUE, nan, b), compat_jmp.select_tree(TRUE, nan, b))
    for wrong in (jnp.array([True, False]), jnp.ones([1]), jnp.float32(1.0)):
        with pytest.raises(GradientError, match="expected boolean scalar"):
            compat_jmp.select_tree(wrong, a, b)
        with pytest.raises(AssertionError):
            compat_jmp.select_tree(wrong, a, b)
    with pytest.raises(StructureError):
        compat_jmp.select_tree(TRUE, a, {"x": jnp.ones(2)})


def test_a_training_step_written_for_jmp_runs_with_compat_jmp():
    def train(names):
        def loss(params, x, scaler):
            half = params.astype(jnp.float16)
            return scaler.scale(jnp.mean((x @ half).astype(jnp.float32) ** 2))

        @jax.jit
        def step(params, x, scaler):
            grads = scaler.unscale(jax.grad(loss)(params, x, scaler))
            finite = names.all_finite(grads)
            params = names.select_tree(finite, params - 0.01 * grads, params)
            return params, scaler.adjust(finite)

        scaler = names.DynamicLossScale(jnp.float32(2.0**30), period=3)
        params, scales = jnp.ones((4, 2)), []
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float16)
        for _ in range(30):
            params, scaler = step(params, x, scaler)
            scales.append(float(scaler.loss_scale))
        return params, scales

    expected, actual = train(jmp), train(compat_jmp)
    assert expected[1] == actual[1]
    check_same(expected[0], actual[0])
    assert min(actual[1]) < 2.0**30  # it did overflow


@pytest.mark.parametrize(
    "settings",
    [{"period": 0}, {"period": 2.5}, {"factor": 1}, {"min_loss_scale": float("nan")}],
)
def test_invalid_settings_are_refused_at_construction(settings):
    with pytest.raises(LossScaleError):
        compat_jmp.DynamicLossScale(jnp.float32(8.0), **settings)
    with pytest.raises(SettingError):
        compat_jmp.StaticLossScale(0)


def test_dataclasses_replace_makes_a_changed_copy():
    scaler = compat_jmp.DynamicLossScale(jnp.float32(8.0), period=20.0)
    assert 20 == scaler.period
    assert 3 == replace(scaler, period=3).period
    assert scaler.loss_scale == replace(scaler, period=3).loss_scale
