"""`select` on whole train states, and `apply_if_finite`, which saves the work."""

from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Fixed  # noqa: E402
from lossscale.errors import GradientError, StructureError  # noqa: E402


class TrainState(NamedTuple):
    params: Any
    optimizer: Any
    batch_stats: Any
    ema: Any
    step: Any
    key: Any
    apply: Any


def apply(x):
    return x


def make_train_state(value, step):
    return TrainState(
        params={"w": jnp.full(2, value), "half": jnp.full(2, value, jnp.float16)},
        optimizer=(jnp.float32(value), None, jnp.int32(step)),
        batch_stats={"mean": np.full(2, value, np.float32)},
        ema=[jnp.full(2, value, jnp.bfloat16)],
        step=step,
        key=jax.random.key(step),
        apply=apply,
    )


def to_lists(state):
    return [
        jax.random.key_data(leaf).tolist()
        if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
        else np.asarray(leaf).astype(np.float64).tolist()
        for leaf in jax.tree.leaves(state._replace(apply=None))
    ]


@pytest.mark.parametrize("finite", [True, False])
def test_a_whole_train_state_is_selected(finite):
    new, old = (
        make_train_state(np.nan if not finite else 2.0, 7),
        make_train_state(1.0, 6),
    )
    chosen = ls.select(jnp.bool_(finite), new, old)
    assert to_lists(new if finite else old) == to_lists(chosen)
    assert chosen.apply is apply
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(old._replace(apply=None))]
    chosen_dtypes = [
        jnp.result_type(x) for x in jax.tree.leaves(chosen._replace(apply=None))
    ]
    assert dtypes == chosen_dtypes


def test_a_python_boolean_returns_one_tree_unchanged():
    new, old = make_train_state(2.0, 7), make_train_state(1.0, 6)
    assert new is ls.select(True, new, old)
    assert old is ls.select(np.False_, new, old)


def test_different_structures_are_reported():
    with pytest.raises(StructureError, match="only the new one has"):
        ls.select(jnp.bool_(True), {"a": 1.0, "b": 2.0}, {"a": 1.0})
    with pytest.raises(StructureError, match="containers"):
        ls.select(jnp.bool_(True), [1.0], (1.0,))


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        (jnp.ones(2), jnp.ones(3), "differ"),
        (jnp.ones(2), jnp.ones(2, jnp.float16), "float16"),
        ("a", "b", "only arrays"),
        (jnp.sin, jnp.cos, "only arrays"),
        ("a", jnp.ones(()), "only arrays"),
    ],
    ids=["shape", "dtype", "text", "function", "type"],
)
def test_leaves_that_cannot_replace_each_other_are_reported(new, old, words):
    with pytest.raises(StructureError, match=words) as caught:
        ls.select(jnp.bool_(True), {"leaf": [new]}, {"leaf": [old]})
    assert "['leaf'][0]" in str(caught.value)


def test_several_flags_are_refused():
    for wrong in (jnp.array([True, False]), np.array([True, False])):
        with pytest.raises(GradientError, match="one boolean"):
            ls.select(wrong, [jnp.ones(2)], [jnp.ones(2)])


def test_a_traced_flag_that_is_nan_never_applies_a_step():
    select = jax.jit(ls.select)
    for wrong in (jnp.nan, jnp.inf, 0.0):
        assert 5.0 == select(jnp.float32(wrong), jnp.float32(1.0), jnp.float32(5.0))
    assert 1.0 == select(jnp.int32(1), jnp.float32(1.0), jnp.float32(5.0))


def test_float0_gradients_of_integers_pass_through():
    def loss(tree):
        return tree["w"] * tree["n"].astype(float)

    tree = {"w": jnp.float32(1.0), "n": jnp.int32(2)}
    grads = jax.grad(loss, allow_int=True)(tree)
    assert jax.dtypes.float0 == grads["n"].dtype
    unscaled, signal = ls.unscale(grads, ls.init(Fixed(2.0)))
    assert bool(signal.finite)
    assert unscaled["n"] is grads["n"]
    chosen = ls.select(signal.finite, unscaled, jax.tree.map(np.copy, grads))
    assert 1.0 == chosen["w"]


def test_the_optimizer_does_not_run_on_a_skipped_step():
    runs = []

    def optimize(state, grads):
        jax.debug.callback(lambda: runs.append(1))
        return {"w": state["w"] - grads, "step": state["step"] + 1}

    step = jax.jit(lambda f, s, g: ls.apply_if_finite(f, optimize, s, g))
    state = {"w": jnp.ones(2), "step": jnp.int32(0)}
    state = step(jnp.bool_(False), state, jnp.full(2, jnp.nan))
    jax.effects_barrier()
    assert ([], 0, [1.0, 1.0]) == (runs, state["step"], state["w"].tolist())
    state = step(jnp.bool_(True), state, jnp.ones(2))
    jax.effects_barrier()
    assert ([1], 1, [0.0, 0.0]) == (runs, state["step"], state["w"].tolist())


def test_under_vmap_the_condition_selects_for_each_element():
    step = jax.vmap(lambda f, w, g: ls.apply_if_finite(f, jnp.subtract, w, g))
    flags = jnp.array([True, False, True])
    grads = jnp.array([1.0, jnp.nan, 3.0])
    assert [4.0, 5.0, 2.0] == step(flags, jnp.full(3, 5.0), grads).tolist()


def test_select_and_apply_if_finite_agree_and_buffers_can_be_donated():
    def optimize(state, grads):
        return jax.tree.map(lambda w: w - grads, state)

    @jax.jit
    def chosen(finite, state, grads):
        return ls.select(finite, optimize(state, grads), state)

    conditional = jax.jit(
        lambda f, s, g: ls.apply_if_finite(f, optimize, s, g), donate_argnums=1
    )
    for finite in (True, False):
        state = {"w": jnp.arange(3.0)}
        expected = chosen(jnp.bool_(finite), state, jnp.float32(2.0))["w"].tolist()
        result = conditional(jnp.bool_(finite), state, jnp.float32(2.0))["w"]
        assert expected == result.tolist()
