"""Every transformation of JAX, applied to a step; the oracle is a loop in NumPy."""

import random
from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from helpers.sequences import overflow_pattern  # noqa: E402

import lossscale.jax as ls  # noqa: E402
import lossscale.numpy  # noqa: E402
from lossscale import Dynamic, Fixed, Signal  # noqa: E402

POLICY = Dynamic(init_scale=2.0**10, growth_interval=3)
FLAGS = overflow_pattern(random.Random(7), 40)


def run_numpy(policy, flags):
    """Return the scale after each step, from the NumPy adapter."""
    state, scales = lossscale.numpy.init(policy), []
    for flag in flags:
        state = lossscale.numpy.update(policy, state, Signal(flag))
        scales.append(float(state.scale))
    return scales


def compute_loss(weight, x):
    """Return a loss whose gradient is x."""
    return jnp.sum(weight * x)


def make_batches(flags):
    return np.array([[1.0, 2.0] if flag else [1.0, np.inf] for flag in flags], "f4")


def train_step(state, weight, x, policy=POLICY):
    result = ls.value_and_grad(compute_loss, policy)(state, weight, x)
    new = weight - 0.5 * result.grads
    return result.state, ls.select(result.signal.finite, new, weight)


def check_weights(weight, flags):
    applied = sum(flags)
    assert [-0.5 * applied, -1.0 * applied] == np.asarray(weight).tolist()


def test_a_loop_under_jit_traces_once_and_gives_numpys_steps():
    traces = []

    @jax.jit
    def step(state, weight, x):
        traces.append(1)
        return train_step(state, weight, x)

    state, weight, scales = ls.init(POLICY), jnp.zeros(2), []
    for x in make_batches(FLAGS):
        state, weight = step(state, weight, x)
        scales.append(float(state.scale))
    assert run_numpy(POLICY, FLAGS) == scales
    check_weights(weight, FLAGS)
    assert [1] == traces
    assert 1 == step._cache_size()


@pytest.mark.parametrize(
    "first",
    [
        ls.init(POLICY),
        POLICY.init(),
        jax.tree.map(np.asarray, ls.init(POLICY)),
    ],
    ids=["arrays", "python numbers", "numpy"],
)
def test_a_state_of_any_type_becomes_strongly_typed(first):
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(1)
        return train_step(state, jnp.zeros(2), x)[0]

    state = first
    for _ in range(4):
        state = step(state, np.ones(2, np.float32))
        assert [False] * 3 == [value.weak_type for value in state]
        assert ["float32", "int32", "int32"] == [str(v.dtype) for v in state]
    # Python numbers are weakly typed arguments: only they need one more trace.
    assert (2 if isinstance(first.scale, float) else 1) == len(traces)


def test_the_scale_is_an_argument_and_never_a_constant_of_the_program():
    step = jax.jit(ls.value_and_grad(compute_loss, Fixed(8.0)))
    seen = []

    @jax.custom_vjp
    def spy(x):
        return x

    spy.defvjp(lambda x: (x, None), lambda _, g: (g,))
    scaled = jax.jit(lambda s, w: jax.grad(lambda w: ls.scale(spy(w), s))(w))
    for scale in (8.0, 16.0):
        state = ls.init(Dynamic(init_scale=scale))
        seen.append(float(scaled(state, jnp.float32(1.0))))
        grads = step(state, jnp.zeros(2), jnp.ones(2)).grads
        assert [1.0, 1.0] == grads.tolist()
    assert [8.0, 16.0] == seen


def test_a_scan_over_steps_gives_numpys_steps():
    @jax.jit
    def run(state, weight, batches):
        def body(carry, x):
            carry = train_step(*carry, x)
            return carry, carry[0].scale

        return jax.lax.scan(body, (state, weight), batches)

    (_, weight), scales = run(ls.init(POLICY), jnp.zeros(2), make_batches(FLAGS))
    assert run_numpy(POLICY, FLAGS) == scales.tolist()
    check_weights(weight, FLAGS)


def test_vmap_has_one_scale_for_each_element():
    patterns = [overflow_pattern(random.Random(seed), 20) for seed in range(5)]
    batches = np.stack([make_batches(flags) for flags in patterns], axis=1)
    states = jax.tree.map(lambda value: jnp.stack([value] * 5), ls.init(POLICY))
    weights, scales = jnp.zeros((5, 2)), []
    step = jax.jit(jax.vmap(train_step))
    for x in batches:
        states, weights = step(states, weights, x)
        scales.append(states.scale.tolist())
    expected = [run_numpy(POLICY, flags) for flags in patterns]
    assert expected == np.array(scales).T.tolist()
    for weight, flags in zip(weights, patterns, strict=True):
        check_weights(weight, flags)


def test_the_state_may_be_donated_step_after_step():
    step = jax.jit(train_step, donate_argnums=(0, 1))
    state, weight = ls.init(POLICY), jnp.zeros(2)
    for x in make_batches(FLAGS):
        before = state
        state, weight = step(state, weight, x)
    assert before.scale.is_deleted()
    check_weights(weight, FLAGS)


def test_a_loss_that_is_rematerialized_gives_the_same_step():
    def deep(weight, x):
        return jnp.sum(jnp.sin(jnp.sin(weight * x)))

    state, weight, x = ls.init(POLICY), jnp.array([0.5, 2.0]), jnp.array([1.0, 3.0])
    plain = jax.jit(ls.value_and_grad(deep, POLICY))(state, weight, x)
    again = jax.jit(ls.value_and_grad(jax.checkpoint(deep), POLICY))(state, weight, x)
    assert plain.grads.tolist() == again.grads.tolist()
    assert plain.value == again.value


def test_a_whole_step_may_be_rematerialized():
    state, weight, x = ls.init(POLICY), jnp.zeros(2), jnp.ones(2)
    plain = train_step(state, weight, x)
    again = jax.checkpoint(train_step)(state, weight, x)
    assert plain[1].tolist() == again[1].tolist()


def test_apply_if_finite_compiles_to_a_condition():
    @jax.jit
    def step(state, weight, x):
        result = ls.value_and_grad(compute_loss, POLICY)(state, weight, x)
        weight = ls.apply_if_finite(
            result.signal.finite, lambda w, g: w - 0.5 * g, weight, result.grads
        )
        return result.state, weight

    state, weight = ls.init(POLICY), jnp.zeros(2)
    for x in make_batches(FLAGS):
        state, weight = step(state, weight, x)
    check_weights(weight, FLAGS)
    text = step.lower(state, weight, make_batches(FLAGS)[0]).as_text()
    assert "stablehlo.case" in text or "stablehlo.if" in text


def test_unscaled_gradients_can_be_differentiated():
    state = ls.init(Fixed(8.0))

    def penalty(weight):
        def inner(w):
            return ls.scale(jnp.sum(w**3), state)

        grads, _ = ls.unscale(jax.grad(inner)(weight), state)
        return jnp.sum(grads**2)

    weight = jnp.array([1.0, 2.0])
    # (3 w^2)^2, differentiated
    assert [36.0, 288.0] == jax.grad(penalty)(weight).tolist()
    assert [36.0, 288.0] == jax.jit(jax.jacfwd(penalty))(weight).tolist()


def test_nothing_leaks_from_a_trace():
    with jax.checking_leaks():
        step = jax.jit(train_step)
        state, weight = step(ls.init(POLICY), jnp.zeros(2), jnp.ones(2))
        jax.block_until_ready(weight)
        jax.jit(jax.vmap(train_step, in_axes=(None, None, 0)))(
            ls.init(POLICY), jnp.zeros(2), jnp.ones((3, 2))
        )
    assert 1 == state.good_steps


def list_primitives(jaxpr):
    """Return the names of all primitives in a jaxpr and its inner jaxprs."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= list_primitives(inner)
    return names


@pytest.mark.parametrize("function", ["update", "step"])
def test_no_program_calls_the_host_or_another_device(function):
    state = ls.init(POLICY)
    if function == "update":
        result = jax.make_jaxpr(lambda s, f: ls.update(POLICY, s, Signal(f)))(
            state, jnp.bool_(True)
        )
    else:
        result = jax.make_jaxpr(train_step)(state, jnp.zeros(2), jnp.ones(2))
    names = list_primitives(result.jaxpr)
    assert "select_n" in names
    for word in ("callback", "infeed", "outfeed", "psum", "pmax", "all_", "print"):
        assert not [name for name in names if word in name], names


def test_the_policy_is_a_static_argument():
    traces = []

    @partial(jax.jit, static_argnums=0)
    def step(policy, state, finite):
        traces.append(policy)
        return ls.update(policy, state, Signal(finite))

    for _ in range(3):  # jit compares policies by value
        step(Dynamic(growth_interval=5), ls.init(POLICY), jnp.bool_(True))
    assert 1 == len(traces)
    step(Dynamic(growth_interval=6), ls.init(POLICY), jnp.bool_(True))
    assert 2 == len(traces)


def test_the_minimum_survives_jit_unlike_jmps():
    policy = Dynamic(init_scale=1.0, min_scale=0.25)
    step = jax.jit(lambda s: ls.update(policy, s, Signal(jnp.bool_(False))))
    state, scales = ls.init(policy), []
    for _ in range(4):
        state = step(state)
        scales.append(float(state.scale))
    assert [0.5, 0.25, 0.25, 0.25] == scales


def test_the_scale_grows_on_the_last_step_of_the_interval_unlike_flaxs():
    policy = Dynamic(init_scale=1.0, growth_interval=4)
    state, scales = ls.init(policy), []
    for _ in range(5):
        state = ls.update(policy, state, Signal(jnp.bool_(True)))
        scales.append(float(state.scale))
    assert [1.0, 1.0, 1.0, 2.0, 2.0] == scales


def test_with_debug_nans_a_finite_step_passes_and_an_overflow_raises():
    with jax.debug_nans(True):
        for step in (train_step, jax.jit(train_step)):
            state, _ = step(ls.init(POLICY), jnp.zeros(2), jnp.ones(2))
            assert 1 == state.good_steps
            with pytest.raises(FloatingPointError):
                step(ls.init(POLICY), jnp.ones(2), jnp.array([1.0, jnp.nan]))
