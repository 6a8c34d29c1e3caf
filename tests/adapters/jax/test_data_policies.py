"""Policies that see more than a flag, where JAX's functions own the step."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from conformance import DATA_POLICIES  # noqa: E402
from jax import export  # noqa: E402

import lossscale.jax as ls  # noqa: E402
import lossscale.numpy as reference  # noqa: E402
from lossscale import (  # noqa: E402
    AboveEdge,
    AutoStart,
    Dynamic,
    Headroom,
    Saturation,
    Signal,
)
from lossscale.errors import SettingError  # noqa: E402

every_policy = pytest.mark.parametrize(
    "policy", DATA_POLICIES, ids=lambda policy: type(policy).__name__
)


def loss(weight, x):
    return jnp.sum((weight * x).astype(jnp.float16)).astype(jnp.float32)


@every_policy
def test_value_and_grad_measures_what_the_policy_reads(policy):
    step = jax.jit(ls.value_and_grad(loss, policy))
    state, expected = ls.init(policy), reference.init(policy)
    for x in (0.5, 3.0, np.inf, 0.25, 1e-3, 20.0):
        scale = np.float32(state.scale)
        _, _, signal, state = step(state, jnp.float32(1.0), jnp.float32(x))
        amax = None if signal.amax is None else np.asarray(signal.amax)
        expected = reference.update(
            policy, expected, Signal(np.asarray(signal.finite), amax=amax)
        )
        assert tuple(map(float, expected)) == tuple(map(float, state))
        assert ("amax" in policy.wants) == (signal.amax is not None)
        has_edge = any(isinstance(item, AboveEdge) for item in policy.wants)
        assert has_edge == (signal.above_edge is not None)
        if amax is not None and signal.finite:
            assert np.float32(np.float16(x)) * scale == pytest.approx(amax, rel=1e-3)


def test_a_few_values_above_the_edge_do_not_lower_the_scale():
    """2 of 16 values: the largest alone would halve the scale."""
    x = jnp.where(jnp.arange(16) < 2, 32.0, 1.0)
    states = {}
    for fraction in (0.1, 0.2):
        policy = Saturation(Dynamic(init_scale=1024.0), fraction=fraction, doubling=1)
        step = jax.jit(ls.value_and_grad(loss, policy))
        states[fraction] = step(ls.init(policy), jnp.ones(16), x).state
        split = ls.accumulate_gradients(loss, policy)
        rows = jnp.stack([x, x])
        assert states[fraction] == split(ls.init(policy), jnp.ones(16), rows).state
    assert [512.0, 2048.0] == [float(state.scale) for state in states.values()]


def test_two_edges_are_one_error_before_the_step():
    with pytest.raises(SettingError, match="got 2 edges"):
        ls.value_and_grad(loss, Saturation(), measure=AboveEdge(1.0))


@pytest.mark.parametrize("exponent", [16, 24, 32, 48])
def test_retries_find_the_first_scale_on_one_batch_wherever_it_starts(exponent):
    policy = AutoStart(Dynamic(init_scale=2.0**exponent))
    step = ls.with_retries(ls.value_and_grad(loss, policy), retries=policy.tries)
    found = jax.jit(step)(ls.init(policy), jnp.float32(1.0), jnp.float32(256.0))
    assert (True, 256.0, 16.0) == (
        bool(found.signal.finite),
        float(found.grads),
        float(found.state.scale),
    )
    assert int(found.retries) <= policy.tries


def test_micro_batches_count_with_the_largest_of_them():
    policy = Headroom(Dynamic(init_scale=8.0))
    step = jax.jit(ls.accumulate_gradients(lambda w, x: w * x, policy))
    batches = jnp.array([1.0, 16.0, 4.0])
    state = step(ls.init(policy), jnp.float32(1.0), batches).state
    assert 16.0 == float(state.peak)


@every_policy
def test_a_step_is_compiled_once_and_scans(policy):
    def body(state, x):
        result = ls.value_and_grad(loss, policy)(state, jnp.float32(1.0), x)
        return result.state, result.state.scale

    xs = jnp.array([0.5, 3.0, jnp.inf, 0.25])
    last, scales = jax.jit(lambda s: jax.lax.scan(body, s, xs))(ls.init(policy))
    assert float(last.scale) == float(scales[-1])


@every_policy
def test_a_state_goes_through_jax_export(policy):
    step = jax.jit(lambda state: ls.update(policy, state, Signal(jnp.bool_(True))))
    state = ls.init(policy)
    exported = export.export(step)(state)
    again = export.deserialize(exported.serialize())
    assert step(state) == again.call(state)


@every_policy
def test_devices_of_an_axis_make_one_decision(policy):
    step = ls.value_and_grad(loss, policy, axis_name="devices")
    run = jax.vmap(step, in_axes=(None, None, 0), axis_name="devices")
    state = run(ls.init(policy), jnp.float32(1.0), jnp.array([0.5, 8.0])).state
    for value in state:
        assert value[0] == value[1]


def test_a_start_is_retried_on_the_same_batch_and_nothing_is_lost():
    policy = AutoStart()
    step = jax.jit(ls.with_retries(ls.value_and_grad(loss, policy), retries=4))
    result = step(ls.init(policy), jnp.float32(1.0), jnp.float32(256.0))
    # 2**16 is no float16; at 2**12 the gradient is 2**20, where 8188 is allowed.
    assert (1, True, 16.0) == (
        int(result.retries),
        bool(result.signal.finite),
        float(result.state.scale),
    )
    assert 256.0 == float(result.grads)
    assert not bool(policy.is_starting(result.state))


def test_a_batch_that_no_scale_helps_counts_as_one_overflow_of_the_start():
    policy = AutoStart()
    step = jax.jit(ls.with_retries(ls.value_and_grad(loss, policy), retries=4))
    result = step(ls.init(policy), jnp.float32(1.0), jnp.float32(jnp.nan))
    assert not bool(result.signal.finite)
    assert bool(policy.is_starting(result.state))
