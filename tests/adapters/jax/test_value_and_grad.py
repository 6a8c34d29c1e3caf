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


def compute_loss(weights, x):
    return jnp.sum(jnp.tanh(weights["kernel"] @ x + weights["bias"]) ** 2)


def make_weights():
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((3, 4)).astype(np.float32)
    return {"kernel": jnp.asarray(kernel), "bias": jnp.ones(3)}


X = jnp.array([1.0, -2.0, 0.5, 3.0])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_power_of_two_gives_exactly_the_gradients_of_jax(compiled):
    compile_ = jax.jit if compiled else lambda function: function
    expected = compile_(jax.value_and_grad(compute_loss))(make_weights(), X)
    step = compile_(ls.value_and_grad(compute_loss, POLICY))
    result = step(ls.init(POLICY), make_weights(), X)
    assert float(expected[0]) == float(result.value)
    for name in ("kernel", "bias"):
        assert expected[1][name].tolist() == result.grads[name].tolist()
    assert bool(result.signal.finite)
    assert bool(result.signal.loss_finite)


def test_gradients_are_unscaled_with_the_scale_of_their_loss():
    """MPX divides by the scale after the update: half the gradient on each growth."""
    step = jax.jit(ls.value_and_grad(lambda w: 3.0 * w, POLICY))
    state = ls.init(POLICY)
    for growth in range(1, 4):
        value, grads, _, state = step(state, jnp.float32(2.0))
        assert (6.0, 3.0) == (value, grads)
        assert 2.0 ** (10 + growth) == state.scale


def test_the_result_has_named_fields_and_aux_is_paired_with_the_loss():
    step = ls.value_and_grad(lambda w: (w**2, {"twice": 2 * w}), POLICY, has_aux=True)
    result = step(ls.init(POLICY), jnp.float32(3.0))
    (value, aux), grads, signal, state = result
    assert (9.0, 6.0, 6.0) == (value, aux["twice"], grads)
    assert signal is result.signal
    assert state is result.state


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), [1, 0], (2,)])
def test_argnums_are_those_of_jax(argnums):
    def loss(a, b, c):
        return jnp.sum(a * b) + jnp.sum(b * c**2)

    args = (jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]), jnp.array([5.0, 6.0]))
    expected = jax.grad(loss, argnums=argnums)(*args)
    result = ls.value_and_grad(loss, POLICY, argnums=argnums)(ls.init(POLICY), *args)
    assert jax.tree.structure(expected) == jax.tree.structure(result.grads)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(result.grads), strict=True)
    for expected_leaf, actual_leaf in pairs:
        assert expected_leaf.tolist() == actual_leaf.tolist()


def test_keyword_arguments_are_passed_to_the_function():
    def loss(w, *, factor):
        return w * factor

    result = ls.value_and_grad(loss, POLICY)(ls.init(POLICY), 2.0, factor=5.0)
    assert (10.0, 5.0) == (result.value, result.grads)


def test_a_float16_loss_is_scaled_in_float32_and_returned_in_float16():
    policy = Fixed(2.0**11)
    step = jax.jit(ls.value_and_grad(lambda w: jnp.sum(w * 20), policy))
    result = step(ls.init(policy), jnp.ones(2, jnp.float16))
    # 40 * 2**11 is beyond float16, 20 * 2**11 is not.
    assert ("float16", 40.0) == (str(result.value.dtype), result.value)
    assert "float32" == str(result.grads.dtype)
    assert [20.0, 20.0] == result.grads.tolist()
    assert bool(result.signal.finite)


def test_a_scale_above_float16_backs_off_until_a_float16_loss_is_finite():
    policy = Dynamic(init_scale=2.0**18)
    step = jax.jit(ls.value_and_grad(jnp.sum, policy))
    state, weight, finite = ls.init(policy), jnp.ones(2, jnp.float16), []
    for _ in range(4):
        result = step(state, weight)
        state = result.state
        finite.append(bool(result.signal.finite))
    assert [False, False, False, True] == finite
    assert [1.0, 1.0] == result.grads.tolist()


def test_small_float16_gradients_survive_only_with_a_scale():
    def loss(w):
        small = w.astype(jnp.float16) * jnp.float16(2.0**-14)
        return (small * jnp.float16(2.0**-14)).astype(jnp.float32)

    assert 0.0 == jax.grad(loss)(jnp.float32(1.0))
    result = ls.value_and_grad(loss, POLICY)(ls.init(POLICY), jnp.float32(1.0))
    assert 2.0**-28 == result.grads


def test_leaves_that_are_not_differentiable_are_passed_on_and_have_gradient_none():
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

    result = ls.value_and_grad(loss, POLICY)(ls.init(POLICY), model, 2.0)
    expected = jax.grad(lambda k: jnp.sum(jnp.sin(k * 2.0 * 3.0)))(model["kernel"])
    assert expected.tolist() == result.grads["kernel"].tolist()
    for name in ("steps", "key", "activation", "missing", "name"):
        assert result.grads[name] is None


def test_float8_state_is_returned_without_being_unscaled():
    """A float8 layer returns its amax history in place of a gradient."""

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

    result = jax.jit(ls.value_and_grad(loss, POLICY))(ls.init(POLICY), variables)
    history = result.grads["_overwrite_with_gradient"]["history"]
    assert [3.0, 1.0] == history.tolist()
    assert 2.0 == result.grads["params"]["w"]
    assert bool(result.signal.finite)


def test_a_float8_layer_of_flax_keeps_its_own_state():
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    model = linen.Dense(4, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    x = 3.0 * jnp.ones((2, 16))
    with jax.numpy_dtype_promotion("standard"):  # flax's own code needs it
        variables = model.init(jax.random.key(0), x)
        step = jax.jit(
            ls.value_and_grad(lambda v: jnp.mean(model.apply(v, x) ** 2), POLICY)
        )
        result = step(ls.init(POLICY), variables)
    (state,) = result.grads["_overwrite_with_gradient"].values()
    # The first entry is the largest input; unscaled, it would be divided by 2**10.
    assert 3.0 == state["input_amax_history"][0]
    assert [1.0] == state["input_scale"].tolist()
    assert bool(result.signal.finite)


def test_passthrough_may_be_replaced():
    def loss(v):
        return v["w"] * 3.0 + v["amax"] * 5.0

    def is_amax(path, leaf):
        return path[-1].key == "amax"

    step = ls.value_and_grad(loss, POLICY, passthrough=is_amax)
    result = step(ls.init(POLICY), {"w": 1.0, "amax": 1.0})
    assert (3.0, 5.0 * 1024) == (result.grads["w"], result.grads["amax"])


def test_measurements_are_computed_on_request():
    step = ls.value_and_grad(lambda w: jnp.sum(w * 3), POLICY, measure=("norm", "amax"))
    result = step(ls.init(POLICY), jnp.ones(4))
    assert (6.0, 3 * 1024.0) == (result.signal.norm, result.signal.amax)
    assert result.signal.nan is None


def test_a_nonfinite_loss_can_hold_the_scale():
    policy = Dynamic(hold_on_nonfinite_loss=True)
    step = jax.jit(ls.value_and_grad(lambda w, x: w * x, policy))
    result = step(ls.init(policy), 1.0, jnp.inf)
    assert not bool(result.signal.finite)
    assert not bool(result.signal.loss_finite)
    assert 65536.0 == result.state.scale


def test_wrong_arguments_raise_errors_that_name_them():
    with pytest.raises(SettingTypeError, match=r"lossscale\.Dynamic"):
        ls.value_and_grad(compute_loss, 65536.0)
    with pytest.raises(SettingTypeError, match=r"lossscale\.Dynamic\(\)"):
        ls.value_and_grad(compute_loss, Dynamic)
    with pytest.raises(SettingError, match="median"):
        ls.value_and_grad(compute_loss, POLICY, measure="median")
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
    result = ls.value_and_grad(loss, POLICY)(ls.init(POLICY), weights)
    assert jax.grad(loss)(weights).tolist() == result.grads.tolist()
