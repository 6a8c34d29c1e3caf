"""Checkpoints: orbax on one device and sharded over eight, and portable states."""

import json

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
orbax = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
jnp = jax.numpy

from helpers.trees import check_same  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import lossscale.jax as verbs  # noqa: E402
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
from lossscale.jax import drop_ins  # noqa: E402

POLICY = Dynamic(init_scale=64.0, growth_interval=3)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def checkpointer():
    with orbax.StandardCheckpointer() as one:
        yield one


def trained(optimizer, params, values=(1.0, jnp.inf, 2.0, 3.0)):
    """Return the state after some steps, one of them bad."""
    step = jax.jit(optimizer.update)
    state = jax.jit(optimizer.init)(params)
    for value in values:
        grads = jax.tree.map(lambda leaf, v=value: jnp.full_like(leaf, v), params)
        _, state = step(grads, state, params)
    return state


def saved_and_restored(checkpointer, folder, state, fresh):
    checkpointer.save(folder / "step", state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(folder / "step", fresh)


def test_orbax_saves_a_whole_optimizer_state(checkpointer, tmp_path):
    optimizer = optax.chain(ls.loss_scaled(optax.adamw(0.1), POLICY))
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    state = trained(optimizer, params)
    restored = saved_and_restored(checkpointer, tmp_path, state, optimizer.init(params))
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
        pytest.skip("eight devices are not there")
    optimizer = ls.loss_scaled(optax.adam(0.1), POLICY)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("data", "model"))
    params = {"w": jax.device_put(jnp.arange(32.0).reshape(8, 4), split)}
    state = trained(optimizer, params)
    # Restored by shapes and shardings alone, then onto a mesh of another shape.
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = saved_and_restored(checkpointer, tmp_path, state, shapes)
    check_same(state, restored)
    moment = restored.inner_state[0].mu["w"]
    assert split.is_equivalent_to(moment.sharding, 2)
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
    moved = checkpointer.restore(tmp_path / "step", wanted)
    check_same(state, moved)
    assert not split.is_equivalent_to(moved.inner_state[0].mu["w"].sharding, 2)


def test_orbax_saves_a_bare_scale_state(checkpointer, tmp_path):
    state = verbs.init(POLICY, ScaleState(8.0, 2, 0))
    restored = saved_and_restored(checkpointer, tmp_path, state, verbs.init(POLICY))
    check_same(state, restored)


def test_orbax_saves_the_drop_ins_and_their_settings_stay_in_the_code(
    checkpointer, tmp_path
):
    state = {
        "jmp": drop_ins.DynamicLossScale(8.0, 2, period=5, min_loss_scale=0.25),
        "flax": drop_ins.DynamicScale(scale=32.0, fin_steps=4, growth_interval=9),
        "static": drop_ins.StaticLossScale(4.0),
    }
    fresh = {
        "jmp": drop_ins.DynamicLossScale(1.0, period=5, min_loss_scale=0.25),
        "flax": drop_ins.DynamicScale(growth_interval=9),
        "static": drop_ins.StaticLossScale(4.0),
    }
    restored = saved_and_restored(checkpointer, tmp_path, state, fresh)
    check_same(state, restored)
    assert 0.25 == restored["jmp"].min_loss_scale


def test_plain_dictionaries_of_a_checkpoint_are_not_taken_for_a_state(
    checkpointer, tmp_path
):
    optimizer = ls.loss_scaled(optax.sgd(0.1), POLICY)
    checkpointer.save(tmp_path / "step", optimizer.init(jnp.ones(2)))
    checkpointer.wait_until_finished()
    loose = checkpointer.restore(tmp_path / "step")
    with pytest.raises(StateError, match="restored into one"):
        ls.get_scale(loose)


def test_a_portable_state_of_jax_goes_on_in_numpy_and_back():
    state = verbs.init(POLICY)
    flags = [True, False, True, True]
    for flag in flags:
        state = verbs.update(POLICY, state, Signal(flag))
    text = json.dumps(to_portable(POLICY, state))
    policy, read = from_portable(json.loads(text))
    there = reference.update(policy, reference.init(policy, read), Signal(finite=True))
    here = verbs.update(POLICY, state, Signal(finite=True))
    assert tuple(map(float, there)) == tuple(map(float, here))
    back = verbs.init(*from_portable(to_portable(policy, there)))
    check_same(here, back)


def test_a_vector_of_scales_is_not_portable():
    states = jax.vmap(lambda _: verbs.init(POLICY))(jnp.arange(2))
    with pytest.raises(StateError):
        to_portable(POLICY, states)


@pytest.mark.parametrize("library", ["jmp", "flax"])
def test_the_state_of_a_drop_in_becomes_one_of_ours(library):
    if library == "jmp":
        one = drop_ins.DynamicLossScale(8.0, 2, period=5, factor=3, min_loss_scale=0.5)
        names = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
        stepped = one.adjust(jnp.bool_(False)).loss_scale
    else:
        one = drop_ins.DynamicScale(scale=8.0, fin_steps=2, growth_interval=5)
        names = tuple(one.__dataclass_fields__)
        stepped = one.value_and_grad(lambda w: w * jnp.inf)(1.0).dynamic_scale.scale
    values = {name: getattr(one, name) for name in names}
    policy, state = from_library(library, values)
    assert ScaleState(8.0, 2, 0) == state
    assert presets.get(library).growth_delay == policy.growth_delay
    after = verbs.update(policy, verbs.init(policy, state), Signal(finite=False))
    check_same(stepped, after.scale)
