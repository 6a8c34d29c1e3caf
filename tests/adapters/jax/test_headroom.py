"""Finite gradients that an optimizer cannot hold, on every way through a step."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Signal  # noqa: E402
from lossscale.jax import drop_ins  # noqa: E402

POLICY = Dynamic(init_scale=1024.0, growth_interval=1000)
TOO_LARGE = 1e20
"""Its square is infinite in float32."""


def loss_of(weight, x):
    """A loss whose true gradient is x."""
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


def choose(signal, optimize, train, grads):
    return ls.select(signal.finite, optimize(train, grads), train)


def branch(signal, optimize, train, grads):
    return ls.apply_if_finite(signal.finite, optimize, train, grads)


WAYS = pytest.mark.parametrize("way", [choose, branch], ids=["select", "condition"])


def run(way, optimize, train, gradients):
    """Return the train state and the scale's after some true gradients."""

    @jax.jit
    def step(state, train, x):
        found = ls.value_and_grad(loss_of, POLICY)(state, train[0], x)
        return found.state, way(found.signal, optimize, train, found.grads)

    state = ls.init(POLICY)
    for gradient in gradients:
        state, train = step(state, train, jnp.full(2, gradient, jnp.float32))
    return train, state


def check_finite(tree):
    """Raise unless every number of a tree is finite."""
    for leaf in jax.tree.leaves(tree):
        np.testing.assert_array_equal(np.isfinite(leaf), True)


@WAYS
def test_a_gradient_that_cannot_be_squared_is_skipped_and_leaves_the_scale(way):
    train = tuple(jnp.ones(2) for _ in range(3))
    after, state = run(way, adam, train, [TOO_LARGE] * 200)
    assert (1024.0, 0, 0) == tuple(value.item() for value in state)
    for expected, actual in zip(train, after, strict=True):
        np.testing.assert_array_equal(expected, actual)


@WAYS
def test_sums_of_squares_over_many_steps_stay_finite(way):
    """Each can be squared; twenty of them cannot be added up."""
    train = jnp.ones(2), jnp.zeros(2)
    after, state = run(way, adagrad, train, [1.5e19] * 20)
    check_finite(after)
    assert 20 == state.good_steps
    assert np.all(after[1] > 1e38)


def test_the_signal_says_why():
    step = jax.jit(ls.value_and_grad(loss_of, POLICY))
    expected = {1.0: (True, False), TOO_LARGE: (False, True), np.inf: (False, False)}
    for gradient, flags in expected.items():
        found = step(ls.init(POLICY), jnp.ones(2), jnp.full(2, gradient, jnp.float32))
        assert flags == (bool(found.signal.finite), bool(found.signal.too_large))


def test_a_gradient_that_is_too_large_is_not_tried_again():
    step = jax.jit(ls.retrying(ls.value_and_grad(loss_of, POLICY), retries=5))
    found = step(ls.init(POLICY), jnp.ones(2), jnp.full(2, TOO_LARGE))
    assert (0, 1024.0) == (found.retries, found.state.scale)
    assert not found.signal.finite


@pytest.mark.parametrize("bad", ["drop", "skip"])
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
    bad, batches, scale, applied_by_dropping
):
    step = jax.jit(ls.accumulating(loss_of, POLICY, bad=bad))
    rows = jnp.asarray(batches, jnp.float32)[:, None] * jnp.ones(2)
    found = step(ls.init(POLICY), jnp.ones(2), rows)
    applied = bad == "drop" and applied_by_dropping
    assert (scale, applied) == (found.state.scale, bool(found.signal.finite))
    only_too_large = not applied and scale == 1024.0
    assert only_too_large == bool(found.signal.too_large)
    if applied:
        kept = [x for x in batches if x < TOO_LARGE]
        np.testing.assert_allclose(found.grads, np.mean(kept), rtol=1e-6)


@pytest.mark.parametrize("way", ["select", "condition"])
def test_no_infinity_and_no_nan_is_written(way):
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
    if way == "select":
        kept = jax.jit(ls.select)(jnp.bool_(True), new, old)
    else:
        kept = ls.apply_if_finite(jnp.bool_(True), lambda _: new, old)
    assert [9.0, 2.0, 3.0, 5.0] == kept["w"].tolist()
    assert ([4.0, 8.0], [1 + 2j]) == (kept["half"].tolist(), kept["complex"].tolist())
    assert 7 == kept["step"]


def test_flaxs_name_skips_what_cannot_be_squared_and_keeps_its_scale():
    scaler = drop_ins.DynamicScale(scale=8.0, fin_steps=3)
    step = jax.jit(lambda s, x: s.value_and_grad(loss_of)(jnp.ones(2), x))
    for gradient, expected in ((TOO_LARGE, (False, 8.0, 3)), (np.inf, (False, 4.0, 0))):
        after, finite, _, _ = step(scaler, jnp.full(2, gradient, jnp.float32))
        assert expected == (bool(finite), after.scale, after.fin_steps)


def test_a_signal_without_the_flag_moves_the_scale():
    assert 512.0 == ls.update(POLICY, ls.init(POLICY), Signal(False)).scale
    signal = Signal(False, too_large=True)
    assert 1024.0 == ls.update(POLICY, ls.init(POLICY), signal).scale
