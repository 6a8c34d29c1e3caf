"""Finite gradients that are too large for an optimizer, in every kind of step."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Signal  # noqa: E402
from lossscale.jax.compat import flax as compat_flax  # noqa: E402

POLICY = Dynamic(init_scale=1024.0, growth_interval=1000)
TOO_LARGE = 1e20
"""Its square is infinite in float32."""


def compute_loss(weight, x):
    """Return a loss whose unscaled gradient is x."""
    return jnp.sum(weight * x)


def adam(train, grads):
    """Return weight and moments after a step of Adam without bias correction."""
    weight, first, second = train
    first = 0.9 * first + 0.1 * grads
    second = 0.999 * second + 0.001 * grads**2
    return weight - 0.1 * first / (jnp.sqrt(second) + 1e-8), first, second


def adagrad(train, grads):
    """Return weight and sum of squares after a step of Adagrad."""
    weight, total = train
    total = total + grads**2
    return weight - 0.1 * grads * jax.lax.rsqrt(total + 1e-7), total


def apply_by_select(signal, optimize, train, grads):
    return ls.select(signal.finite, optimize(train, grads), train)


def apply_by_condition(signal, optimize, train, grads):
    return ls.apply_if_finite(signal.finite, optimize, train, grads)


APPLY = pytest.mark.parametrize(
    "apply", [apply_by_select, apply_by_condition], ids=["select", "condition"]
)


def run(apply, optimize, train, gradients):
    """Return the train state and the scale state after some unscaled gradients."""

    @jax.jit
    def step(state, train, x):
        result = ls.value_and_grad(compute_loss, POLICY)(state, train[0], x)
        return result.state, apply(result.signal, optimize, train, result.grads)

    state = ls.init(POLICY)
    for gradient in gradients:
        state, train = step(state, train, jnp.full(2, gradient, jnp.float32))
    return train, state


def check_finite(tree):
    """Raise unless every number of a tree is finite."""
    for leaf in jax.tree.leaves(tree):
        np.testing.assert_array_equal(np.isfinite(leaf), True)


@APPLY
def test_a_gradient_that_cannot_be_squared_is_skipped_and_leaves_the_scale(apply):
    train = tuple(jnp.ones(2) for _ in range(3))
    after, state = run(apply, adam, train, [TOO_LARGE] * 200)
    assert (1024.0, 0, 0) == tuple(value.item() for value in state)
    for expected, actual in zip(train, after, strict=True):
        np.testing.assert_array_equal(expected, actual)


@APPLY
def test_sums_of_squares_over_many_steps_stay_finite(apply):
    """Each can be squared; the sum of twenty squares overflows."""
    train = jnp.ones(2), jnp.zeros(2)
    after, state = run(apply, adagrad, train, [1.5e19] * 20)
    check_finite(after)
    assert 20 == state.good_steps
    assert np.all(after[1] > 1e38)


def test_the_signal_distinguishes_too_large_from_overflow():
    step = jax.jit(ls.value_and_grad(compute_loss, POLICY))
    expected = {1.0: (True, False), TOO_LARGE: (False, True), np.inf: (False, False)}
    for gradient, flags in expected.items():
        result = step(ls.init(POLICY), jnp.ones(2), jnp.full(2, gradient, jnp.float32))
        assert flags == (bool(result.signal.finite), bool(result.signal.too_large))


def test_a_gradient_that_is_too_large_is_not_retried():
    step = jax.jit(ls.with_retries(ls.value_and_grad(compute_loss, POLICY), retries=5))
    result = step(ls.init(POLICY), jnp.ones(2), jnp.full(2, TOO_LARGE))
    assert (0, 1024.0) == (result.retries, result.state.scale)
    assert not result.signal.finite


@pytest.mark.parametrize("on_overflow", ["drop", "skip"])
@pytest.mark.parametrize(
    ("batches", "scale", "applied_by_dropping"),
    [
        ([1.0, TOO_LARGE, 3.0], 1024.0, True),
        ([TOO_LARGE, TOO_LARGE], 1024.0, False),
        ([1.0, TOO_LARGE, np.inf], 512.0, True),
        ([np.inf, TOO_LARGE], 512.0, False),
    ],
)
def test_micro_batches_that_are_too_large_leave_the_scale(
    on_overflow, batches, scale, applied_by_dropping
):
    step = jax.jit(
        ls.accumulate_gradients(compute_loss, POLICY, on_overflow=on_overflow)
    )
    rows = jnp.asarray(batches, jnp.float32)[:, None] * jnp.ones(2)
    result = step(ls.init(POLICY), jnp.ones(2), rows)
    applied = on_overflow == "drop" and applied_by_dropping
    assert (scale, applied) == (result.state.scale, bool(result.signal.finite))
    only_too_large = not applied and scale == 1024.0
    assert only_too_large == bool(result.signal.too_large)
    if applied:
        kept = [x for x in batches if x < TOO_LARGE]
        np.testing.assert_allclose(result.grads, np.mean(kept), rtol=1e-6)


@pytest.mark.parametrize("apply", ["select", "condition"])
def test_no_infinity_and_no_nan_is_written(apply):
    old = {
        "w": jnp.array([1.0, 2.0, 3.0, np.inf]),
        "half": jnp.array([4.0, 5.0], jnp.float16),
        "complex": jnp.array([1 + 2j], jnp.complex64),
        "step": jnp.int32(6),
    }
    new = {
        "w": jnp.array([9.0, np.inf, np.nan, 5.0]),
        "half": jnp.array([-np.inf, 8.0], jnp.float16),
        "complex": jnp.array([complex(3.0, np.inf)], jnp.complex64),
        "step": jnp.int32(7),
    }
    if apply == "select":
        kept = jax.jit(ls.select)(jnp.bool_(True), new, old)
    else:
        kept = ls.apply_if_finite(jnp.bool_(True), lambda _: new, old)
    assert [9.0, 2.0, 3.0, 5.0] == kept["w"].tolist()
    assert ([4.0, 8.0], [1 + 2j]) == (kept["half"].tolist(), kept["complex"].tolist())
    assert 7 == kept["step"]


def test_compat_flax_skips_a_gradient_that_is_too_large_and_keeps_its_scale():
    scaler = compat_flax.DynamicScale(scale=8.0, fin_steps=3)
    step = jax.jit(lambda s, x: s.value_and_grad(compute_loss)(jnp.ones(2), x))
    for gradient, expected in ((TOO_LARGE, (False, 8.0, 3)), (np.inf, (False, 4.0, 0))):
        after, finite, _, _ = step(scaler, jnp.full(2, gradient, jnp.float32))
        assert expected == (bool(finite), after.scale, after.fin_steps)


def test_a_signal_without_too_large_lowers_the_scale():
    assert 512.0 == ls.update(POLICY, ls.init(POLICY), Signal(False)).scale
    signal = Signal(False, too_large=True)
    assert 1024.0 == ls.update(POLICY, ls.init(POLICY), signal).scale
