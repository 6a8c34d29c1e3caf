"""`value_and_grad`, with jax.value_and_grad as the oracle."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402
from lossscale.errors import (  # noqa: E402
    GradientError,
    SettingError,
    SettingTypeError,
)

POLICY = Dynamic(init_scale=2.0**10, growth_interval=1)


def loss_of(weights, x):
    return jnp.sum(jnp.tanh(weights["kernel"] @ x + weights["bias"]) ** 2)


def weights_of():
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((3, 4)).astype(np.float32)
    return {"kernel": jnp.asarray(kernel), "bias": jnp.ones(3)}


X = jnp.array([1.0, -2.0, 0.5, 3.0])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_power_of_two_gives_exactly_the_gradients_of_jax(compiled):
    compile_ = jax.jit if compiled else lambda function: function
    expected = compile_(jax.value_and_grad(loss_of))(weights_of(), X)
    step = compile_(ls.value_and_grad(loss_of, POLICY))
    found = step(ls.init(POLICY), weights_of(), X)
    assert float(expected[0]) == float(found.value)
    for name in ("kernel", "bias"):
        assert expected[1][name].tolist() == found.grads[name].tolist()
    assert bool(found.signal.finite)
    assert bool(found.signal.loss_finite)


def test_gradients_are_unscaled_with_the_scale_they_were_made_with():
    """MPX divides by the scale after the update: half the gradient on each growth."""
    step = jax.jit(ls.value_and_grad(lambda w: 3.0 * w, POLICY))
    state = ls.init(POLICY)
    for growth in range(1, 4):
        value, grads, _, state = step(state, jnp.float32(2.0))
        assert (6.0, 3.0) == (value, grads)
        assert 2.0 ** (10 + growth) == state.scale


def test_the_result_has_names_and_aux_stands_beside_the_loss():
    step = ls.value_and_grad(lambda w: (w**2, {"twice": 2 * w}), POLICY, has_aux=True)
    found = step(ls.init(POLICY), jnp.float32(3.0))
    (value, aux), grads, signal, state = found
    assert (9.0, 6.0, 6.0) == (value, aux["twice"], grads)
    assert signal is found.signal
    assert state is found.state


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), [1, 0], (2,)])
def test_argnums_are_those_of_jax(argnums):
    def loss(a, b, c):
        return jnp.sum(a * b) + jnp.sum(b * c**2)

    args = (jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]), jnp.array([5.0, 6.0]))
    expected = jax.grad(loss, argnums=argnums)(*args)
    found = ls.value_and_grad(loss, POLICY, argnums=argnums)(ls.init(POLICY), *args)
    assert jax.tree.structure(expected) == jax.tree.structure(found.grads)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found.grads), strict=True)
    for one, other in pairs:
        assert one.tolist() == other.tolist()


def test_keywords_reach_the_function():
    def loss(w, *, factor):
        return w * factor

    found = ls.value_and_grad(loss, POLICY)(ls.init(POLICY), 2.0, factor=5.0)
    assert (10.0, 5.0) == (found.value, found.grads)


def test_a_float16_loss_is_scaled_in_float32_and_comes_back_as_it_was():
    policy = Fixed(2.0**11)
    step = jax.jit(ls.value_and_grad(lambda w: jnp.sum(w * 20), policy))
    found = step(ls.init(policy), jnp.ones(2, jnp.float16))
    # 40 * 2**11 is beyond float16, 20 * 2**11 is not.
    assert ("float16", 40.0) == (str(found.value.dtype), found.value)
    assert "float32" == str(found.grads.dtype)
    assert [20.0, 20.0] == found.grads.tolist()
    assert bool(found.signal.finite)


def test_a_scale_beyond_float16_backs_off_until_a_float16_loss_can_bear_it():
    policy = Dynamic(init_scale=2.0**18)
    step = jax.jit(ls.value_and_grad(jnp.sum, policy))
    state, weight, finite = ls.init(policy), jnp.ones(2, jnp.float16), []
    for _ in range(4):
        found = step(state, weight)
        state = found.state
        finite.append(bool(found.signal.finite))
    assert [False, False, False, True] == finite
    assert [1.0, 1.0] == found.grads.tolist()


def test_small_float16_gradients_survive_that_vanish_without_a_scale():
    def loss(w):
        small = w.astype(jnp.float16) * jnp.float16(2.0**-14)
        return (small * jnp.float16(2.0**-14)).astype(jnp.float32)

    assert 0.0 == jax.grad(loss)(jnp.float32(1.0))
    found = ls.value_and_grad(loss, POLICY)(ls.init(POLICY), jnp.float32(1.0))
    assert 2.0**-28 == found.grads


def test_integers_keys_functions_and_none_reach_the_function_and_get_none():
    model = {
        "kernel": jnp.array([1.0, 2.0]),
        "steps": jnp.int32(3),
        "key": jax.random.key(0),
        "activation": jnp.sin,
        "missing": None,
        "name": "dense",
    }

    def loss(model, x):
        assert model["missing"] is None
        assert "dense" == model["name"]
        noise = jax.random.normal(model["key"], ()) * 0
        out = model["activation"](model["kernel"] * x * model["steps"].astype(float))
        return jnp.sum(out) + noise

    found = ls.value_and_grad(loss, POLICY)(ls.init(POLICY), model, 2.0)
    expected = jax.grad(lambda k: jnp.sum(jnp.sin(k * 2.0 * 3.0)))(model["kernel"])
    assert expected.tolist() == found.grads["kernel"].tolist()
    for name in ("steps", "key", "activation", "missing", "name"):
        assert found.grads[name] is None


def test_float8_state_is_overwritten_with_what_its_gradient_holds():
    """What a float8 layer returns for its amax history is no gradient."""

    @jax.custom_vjp
    def layer(w, history):
        return w * 2.0

    def forward(w, history):
        return layer(w, history), jnp.roll(history, 1).at[0].set(jnp.abs(w))

    layer.defvjp(forward, lambda history, g: (2.0 * g, history))
    variables = {
        "params": {"w": jnp.float32(3.0)},
        "_overwrite_with_gradient": {"history": jnp.array([1.0, jnp.inf])},
    }

    def loss(v):
        return layer(v["params"]["w"], v["_overwrite_with_gradient"]["history"])

    found = jax.jit(ls.value_and_grad(loss, POLICY))(ls.init(POLICY), variables)
    history = found.grads["_overwrite_with_gradient"]["history"]
    assert [3.0, 1.0] == history.tolist()
    assert 2.0 == found.grads["params"]["w"]
    assert bool(found.signal.finite)


def test_a_float8_layer_of_flax_keeps_its_own_state():
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    model = linen.Dense(4, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    x = 3.0 * jnp.ones((2, 16))
    with jax.numpy_dtype_promotion("standard"):  # flax's own code needs it
        variables = model.init(jax.random.key(0), x)
        step = jax.jit(
            ls.value_and_grad(lambda v: jnp.mean(model.apply(v, x) ** 2), POLICY)
        )
        found = step(ls.init(POLICY), variables)
    (state,) = found.grads["_overwrite_with_gradient"].values()
    # The largest input goes first into the history; divided by 2**10 it would be lost.
    assert 3.0 == state["input_amax_history"][0]
    assert [1.0] == state["input_scale"].tolist()
    assert bool(found.signal.finite)


def test_another_filter_may_be_given():
    def loss(v):
        return v["w"] * 3.0 + v["amax"] * 5.0

    def is_amax(path, leaf):
        return path[-1].key == "amax"

    step = ls.value_and_grad(loss, POLICY, as_is=is_amax)
    found = step(ls.init(POLICY), {"w": 1.0, "amax": 1.0})
    assert (3.0, 5.0 * 1024) == (found.grads["w"], found.grads["amax"])


def test_measurements_are_made_when_asked_for():
    step = ls.value_and_grad(lambda w: jnp.sum(w * 3), POLICY, measure=("norm", "amax"))
    found = step(ls.init(POLICY), jnp.ones(4))
    assert (6.0, 3 * 1024.0) == (found.signal.norm, found.signal.amax)
    assert found.signal.nan is None


def test_a_loss_that_is_not_finite_can_leave_the_scale_alone():
    policy = Dynamic(hold_on_nonfinite_loss=True)
    step = jax.jit(ls.value_and_grad(lambda w, x: w * x, policy))
    found = step(ls.init(policy), 1.0, jnp.inf)
    assert not bool(found.signal.finite)
    assert not bool(found.signal.loss_finite)
    assert 65536.0 == found.state.scale


def test_mistakes_are_named():
    with pytest.raises(SettingTypeError, match=r"lossscale\.Dynamic"):
        ls.value_and_grad(loss_of, 65536.0)
    with pytest.raises(SettingTypeError, match=r"lossscale\.Dynamic\(\)"):
        ls.value_and_grad(loss_of, Dynamic)
    with pytest.raises(SettingError, match="median"):
        ls.value_and_grad(loss_of, POLICY, measure="median")
    with pytest.raises(GradientError, match="nothing to differentiate"):
        ls.value_and_grad(lambda w: 1.0, POLICY)(ls.init(POLICY), jnp.int32(3))
    with pytest.raises(GradientError, match="The loss is int32"):
        ls.value_and_grad(lambda w: jnp.int32(3), POLICY)(ls.init(POLICY), 1.0)
    with pytest.raises(GradientError, match="The loss is complex64"):
        ls.value_and_grad(lambda w: w * 1j, POLICY)(ls.init(POLICY), jnp.complex64(1))


def test_complex_weights_have_the_gradients_of_jax():
    def loss(w):
        return jnp.sum(jnp.abs(w) ** 2)

    weights = jnp.array([1 + 2j, 3 - 1j], jnp.complex64)
    found = ls.value_and_grad(loss, POLICY)(ls.init(POLICY), weights)
    assert jax.grad(loss)(weights).tolist() == found.grads.tolist()
