"""Checkpoints: orbax on one device and sharded over eight, and portable states."""

import json

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
orbax = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
jnp = jax.numpy

from conformance import DATA_POLICIES, magnitude_trace  # noqa: E402
from helpers.trees import check_same  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import lossscale.jax as lsj  # noqa: E402
import lossscale.numpy as reference  # noqa: E402
import lossscale.optax as ls  # noqa: E402
from lossscale import (  # noqa: E402
    Dynamic,
    ScaleState,
    Signal,
    from_portable,
    presets,
    to_portable,
)
from lossscale.convert import from_library  # noqa: E402
from lossscale.errors import StateError  # noqa: E402
from lossscale.jax.compat import flax as compat_flax  # noqa: E402
from lossscale.jax.compat import jmp as compat_jmp  # noqa: E402

POLICY = Dynamic(init_scale=64.0, growth_interval=3)


pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def checkpointer():
    with orbax.StandardCheckpointer() as orbax_checkpointer:
        yield orbax_checkpointer


def train(optimizer, params, values=(1.0, jnp.inf, 2.0, 3.0)):
    """Return the state after some steps, one of which overflows."""
    step = jax.jit(optimizer.update)
    state = jax.jit(optimizer.init)(params)
    for value in values:
        grads = jax.tree.map(lambda leaf, v=value: jnp.full_like(leaf, v), params)
        _, state = step(grads, state, params)
    return state


def save_and_restore(checkpointer, folder, state, fresh):
    checkpointer.save(folder / "step", state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(folder / "step", fresh)


def test_orbax_saves_a_whole_optimizer_state(checkpointer, tmp_path):
    optimizer = optax.chain(ls.loss_scaled(optax.adamw(0.1), POLICY))
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    state = train(optimizer, params)
    restored = save_and_restore(checkpointer, tmp_path, state, optimizer.init(params))
    check_same(state, restored)
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return optimizer.update(params, state, params)

    check_same(step(state), step(restored))
    assert [1] == traces


def test_orbax_saves_and_restores_a_state_sharded_over_eight_devices(
    checkpointer, tmp_path
):
    if len(jax.devices()) < 8:
        pytest.skip("there are fewer than eight devices")
    optimizer = ls.loss_scaled(optax.adam(0.1), POLICY)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    params = {"w": jax.device_put(jnp.arange(32.0).reshape(8, 4), sharding)}
    state = train(optimizer, params)
    # Restored by shapes and shardings alone, then onto a mesh of another shape.
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = save_and_restore(checkpointer, tmp_path, state, shapes)
    check_same(state, restored)
    moment = restored.inner_state[0].mu["w"]
    assert sharding.is_equivalent_to(moment.sharding, 2)
    assert restored.scale_state.scale.sharding.is_fully_replicated
    other = Mesh(np.array(jax.devices()[:8]), ("data",))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(other, PartitionSpec(*["data"] * min(x.ndim, 1))),
        ),
        state,
    )
    resharded = checkpointer.restore(tmp_path / "step", wanted)
    check_same(state, resharded)
    assert not sharding.is_equivalent_to(resharded.inner_state[0].mu["w"].sharding, 2)


def test_orbax_saves_a_bare_scale_state(checkpointer, tmp_path):
    state = lsj.init(POLICY, ScaleState(8.0, 2, 0))
    restored = save_and_restore(checkpointer, tmp_path, state, lsj.init(POLICY))
    check_same(state, restored)


every_data_policy = pytest.mark.parametrize(
    "policy", DATA_POLICIES, ids=lambda policy: type(policy).__name__
)


def walk(policy, state, trace):
    """Return the state after steps whose gradients have given magnitudes."""
    update = jax.jit(lambda state, signal: lsj.update(policy, state, signal))
    for finite, magnitude in trace:
        amax = jnp.float32(magnitude) * state.scale
        state = update(state, Signal(jnp.asarray(finite), amax=amax))
    return state


@every_data_policy
def test_orbax_saves_what_a_policy_remembers(policy, checkpointer, tmp_path):
    trace = magnitude_trace(7, 60)
    state = walk(policy, lsj.init(policy), trace[:25])
    restored = save_and_restore(checkpointer, tmp_path, state, lsj.init(policy))
    assert type(policy.init()) is type(restored)
    check_same(state, restored)
    check_same(walk(policy, state, trace[25:]), walk(policy, restored, trace[25:]))


@every_data_policy
def test_flax_serializes_what_a_policy_remembers(policy):
    serialization = pytest.importorskip(
        "flax.serialization", reason="flax is not installed"
    )
    optimizer = ls.loss_scaled(optax.adam(0.1), policy)
    params = {"w": jnp.ones(3)}
    state = train(optimizer, params, (1.0, 3.0, jnp.inf, 0.25))
    fresh = optimizer.init(params)
    if len(state.scale_state) > 3:
        assert fresh.scale_state[3:] != state.scale_state[3:]
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    check_same(state, restored)
    step = jax.jit(optimizer.update)
    check_same(step(params, state, params), step(params, restored, params))


def test_orbax_saves_the_scales_of_jmp_and_flax_without_their_settings(
    checkpointer, tmp_path
):
    state = {
        "jmp": compat_jmp.DynamicLossScale(8.0, 2, period=5, min_loss_scale=0.25),
        "flax": compat_flax.DynamicScale(scale=32.0, fin_steps=4, growth_interval=9),
        "static": compat_jmp.StaticLossScale(4.0),
    }
    fresh = {
        "jmp": compat_jmp.DynamicLossScale(1.0, period=5, min_loss_scale=0.25),
        "flax": compat_flax.DynamicScale(growth_interval=9),
        "static": compat_jmp.StaticLossScale(4.0),
    }
    restored = save_and_restore(checkpointer, tmp_path, state, fresh)
    check_same(state, restored)
    assert 0.25 == restored["jmp"].min_loss_scale


def test_plain_dictionaries_of_a_checkpoint_are_refused(checkpointer, tmp_path):
    optimizer = ls.loss_scaled(optax.sgd(0.1), POLICY)
    checkpointer.save(tmp_path / "step", optimizer.init(jnp.ones(2)))
    checkpointer.wait_until_finished()
    dictionaries = checkpointer.restore(tmp_path / "step")
    with pytest.raises(StateError, match="restored into such a state"):
        ls.get_scale(dictionaries)


def test_a_portable_state_of_jax_continues_in_numpy_and_back():
    state = lsj.init(POLICY)
    flags = [True, False, True, True]
    for flag in flags:
        state = lsj.update(POLICY, state, Signal(flag))
    text = json.dumps(to_portable(POLICY, state))
    policy, read = from_portable(json.loads(text))
    in_numpy = reference.update(
        policy, reference.init(policy, read), Signal(finite=True)
    )
    in_jax = lsj.update(POLICY, state, Signal(finite=True))
    assert tuple(map(float, in_numpy)) == tuple(map(float, in_jax))
    back = lsj.init(*from_portable(to_portable(policy, in_numpy)))
    check_same(in_jax, back)


def test_a_vector_of_scales_is_not_portable():
    states = jax.vmap(lambda _: lsj.init(POLICY))(jnp.arange(2))
    with pytest.raises(StateError):
        to_portable(POLICY, states)


@pytest.mark.parametrize("library", ["jmp", "flax"])
def test_the_state_of_jmp_or_flax_is_converted(library):
    if library == "jmp":
        scaler = compat_jmp.DynamicLossScale(
            8.0, 2, period=5, factor=3, min_loss_scale=0.5
        )
        names = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
        next_scale = scaler.adjust(jnp.bool_(False)).loss_scale
    else:
        scaler = compat_flax.DynamicScale(scale=8.0, fin_steps=2, growth_interval=5)
        names = tuple(scaler.__dataclass_fields__)
        next_scale = scaler.value_and_grad(lambda w: w * jnp.inf)(
            1.0
        ).dynamic_scale.scale
    values = {name: getattr(scaler, name) for name in names}
    policy, state = from_library(library, values)
    assert ScaleState(8.0, 2, 0) == state
    assert presets.get(library).growth_delay == policy.growth_delay
    after = lsj.update(policy, lsj.init(policy, state), Signal(finite=False))
    check_same(next_scale, after.scale)
