"""`lossscale.jax.explain`: planted faults, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lossscale.jax as ls
from lossscale import Dynamic
from lossscale.errors import (
    ContextError,
    GradientError,
    SettingError,
    SettingTypeError,
    StateError,
)
from lossscale.testing.jax import inject

HALF = jnp.float16
linen = pytest.importorskip("flax.linen", reason="flax is not installed")


class Net(linen.Module):
    """Two float16 layers with something between them."""

    between: object = linen.relu

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, dtype=HALF, name="up")(x)
        with jax.named_scope("between"):
            x = self.between(x)
        return linen.Dense(2, dtype=HALF, name="down")(x)


def net(between=linen.relu, kernel=1.0):
    """Return a loss of a linen model, and its parameters: kernels of one number."""
    model = Net(between=between)
    params = model.init(jax.random.key(0), jnp.ones((2, 3)))
    params = jax.tree.map(lambda leaf: jnp.full_like(leaf, kernel), params)
    return lambda p, x: jnp.mean(model.apply(p, x).astype(jnp.float32)), params


def overflow_in_forward():
    loss, params = net(kernel=100.0)
    return loss, (params, jnp.full((2, 3), 1000.0))


def overflow_of_the_scale():
    loss, params = net()
    return lambda p, x: loss(p, x) * 4096.0, (params, jnp.ones((2, 3)))


def normalisation_without_epsilon():
    def normalise(x):
        return (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)

    loss, params = net(normalise)
    return loss, (params, jnp.ones((2, 3)))


def root_at_zero():
    def norm_of(x):
        return jnp.sqrt(x * 0)

    loss, params = net(norm_of)
    return loss, (params, jnp.ones((2, 3)))


def exponential():
    loss, params = net(jnp.exp, kernel=4.0)
    return loss, (params, jnp.ones((2, 3)))


def bad_batch():
    loss, params = net()
    return loss, (params, jnp.ones((2, 3)).at[1, 2].set(jnp.nan))


def bad_parameter():
    loss, params = net()
    name = "['params']['down']['kernel']"
    return loss, (inject(params, name, "inf", step=1, steps=1), jnp.ones((2, 3)))


def logarithm_in_the_loss():
    def loss(w, x):
        probabilities = jax.nn.softmax(w * x)
        with jax.named_scope("cross_entropy"):
            return -jnp.log(probabilities[0])

    return loss, (jnp.float32(1.0), jnp.array([-200.0, 200.0]))


def masked_row():
    def loss(w, x):
        with jax.named_scope("attention"):
            logits = jnp.where(jnp.zeros(3, bool), w * x, -jnp.inf)
            return jax.nn.softmax(logits).sum()

    return loss, (jnp.float32(1.0), jnp.ones(3))


def residuals_in_a_scan():
    def loss(w, x):
        def block(carry, _):
            with jax.named_scope("block"):
                return carry + carry * w, None

        out, _ = jax.lax.scan(block, x, None, length=20)
        return out.astype(jnp.float32).mean()

    return loss, (HALF(2.0), jnp.ones(2, HALF))


def gradients_that_explode_under_checkpoint():
    @jax.checkpoint
    def block(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(x * w)

    def loss(w, x):
        for _ in range(3):
            x = block(x, w)
        return x.astype(jnp.float32).sum()

    return loss, (HALF(64.0), jnp.zeros(2, HALF))


@jax.custom_vjp
def identity(x):
    return x


identity.defvjp(lambda x: (x, x), lambda x, grad: (grad / (x - x),))


def custom_derivative():
    def loss(w, x):
        with jax.named_scope("straight_through"):
            return identity(w * x).sum()

    return loss, (jnp.float32(1.0), jnp.ones(3))


def branch():
    def loss(w, x):
        with jax.named_scope("gate"):
            return jax.lax.cond(x[0] > 0, jnp.log, jnp.negative, w * x[1])

    return loss, (jnp.float32(2.0), jnp.array([1.0, -3.0]))


def embedding():
    def loss(table, x):
        with jax.named_scope("embed"):
            rows = table[x]
        return rows.astype(jnp.float32).sum()

    return loss, (jnp.ones((3, 2), HALF), jnp.zeros(256, jnp.int32))


def negative_base():
    def loss(w, x):
        return jnp.sum((w * x) ** jnp.float32(0.5 + 0 * w))

    return loss, (jnp.float32(1.0), jnp.array([1.0, -1.0]))


def equinox_layer():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    layer = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 200.0, HALF), layer)
    return lambda m, x: m(x).astype(jnp.float32).sum(), (
        layer,
        jnp.full(3, 200.0, HALF),
    )


def nnx_layer():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    layer = nnx.Linear(3, 2, dtype=HALF, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    params = jax.tree.map(lambda leaf: jnp.full_like(leaf, 200.0), params)
    return (
        lambda p, x: nnx.merge(graph, p)(x).astype(jnp.float32).sum(),
        (params, jnp.full((1, 3), 200.0)),
    )


FAULTS = {
    # the fault: pass, layer, operation, what it did, whether a lower scale helps
    overflow_in_forward: ("forward", "Net/up", "dot_general", "overflow", False),
    overflow_of_the_scale: ("backward", None, "convert_element_type", "overflow", True),
    normalisation_without_epsilon: ("forward", "Net/between", "div", "0 / 0", False),
    root_at_zero: ("backward", "Net/between", "div", "division by zero", False),
    exponential: ("forward", "Net/between", "exp", "overflow", False),
    bad_batch: ("given", None, None, "batch", False),
    bad_parameter: ("given", None, None, "parameter", False),
    logarithm_in_the_loss: ("forward", "cross_entropy", "log", "log of 0", False),
    masked_row: ("forward", "attention", "sub", "row of -inf", False),
    residuals_in_a_scan: ("forward", "block", "mul", "overflow", False),
    gradients_that_explode_under_checkpoint: (
        *("backward", "block", "mul", "overflow"),
        True,
    ),
    custom_derivative: (
        "backward",
        "straight_through",
        "div",
        "division by zero",
        False,
    ),
    branch: ("forward", "gate", "log", "log of a negative number", False),
    embedding: ("backward", "embed", "scatter-add", "overflow", True),
    negative_base: ("forward", None, "pow", "negative base", False),
    equinox_layer: ("forward", "eqx.nn.Linear", "dot_general", "overflow", False),
    nnx_layer: ("forward", "Linear", "dot_general", "overflow", False),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_explained(fault):
    loss, args = fault()
    before = jax.tree.map(np.array, args)
    seen = ls.explain(loss, 1024.0, *args)
    found = seen.first
    assert FAULTS[fault] == (
        found.direction,
        found.module,
        found.operation,
        found.origin,
        seen.lower_scale_helps,
    ), str(seen)
    assert not seen.finite
    assert (found.direction == "backward") == seen.loss_finite
    jax.tree.map(np.testing.assert_array_equal, before, args)
    # The advice follows from a scale that was tried on the compiled program.
    if seen.lower_scale_helps:
        step = jax.jit(ls.value_and_grad(loss, Dynamic(init_scale=seen.helping_scale)))
        state = ls.init(Dynamic(init_scale=seen.helping_scale))
        assert bool(step(state, *args).signal.finite)


def test_the_magnitude_is_that_of_a_wider_format():
    loss, args = overflow_in_forward()
    found = ls.explain(loss, 1.0, *args).first
    assert (3 * 1000.0 * 100.0, 65504.0, "float16") == (
        found.magnitude,
        found.largest,
        found.dtype,
    )


def test_float32_is_measured_in_float64():
    seen = ls.explain(lambda w, x: (w * x).sum(), 1.0, jnp.float32(1e30), 1e30)
    assert seen.first.magnitude == pytest.approx(1e60)
    assert "mul" == seen.first.operation


def test_arguments_and_gradients_are_named():
    loss, args = bad_parameter()
    seen = ls.explain(loss, 1.0, *args)
    assert "['params']['down']['kernel']" == seen.first.tensor
    seen = ls.explain(bad_batch()[0], 1.0, *bad_batch()[1])
    assert "argument 1" == seen.first.tensor
    seen = ls.explain(lambda w, *, mask: w * mask, 1.0, 2.0, mask=jnp.float32(jnp.inf))
    assert "mask" == seen.first.tensor


def test_several_arguments_are_differentiated():
    def loss(a, b, c):
        return (a["w"] * b).sum(), c

    seen = ls.explain(
        loss,
        ls.init(Dynamic()),
        {"w": jnp.ones(2, HALF)},
        jnp.full(2, 0.5, HALF),
        "not an array",
        argnums=(1, 0),
        has_aux=True,
    )
    assert seen.lower_scale_helps
    assert {seen.first_nonfinite_gradient, seen.last_finite_gradient} <= {
        *("argument 1", "argument 0['w']"),
        None,
    }


def test_the_line_is_the_user_s():
    loss, args = equinox_layer()
    line = ls.explain(loss, 1.0, *args).first.line
    assert f"test_explain.py:{loss.__code__.co_firstlineno}" == line


def test_the_gradients_are_bracketed_in_the_order_of_the_backward_pass():
    def loss(p, x):
        with jax.named_scope("first"):
            x = jnp.tanh(p["a"] * x)
        with jax.named_scope("second"):
            x = jnp.sqrt(p["b"] * x)
        return (p["c"] * x).sum()

    params = {"a": jnp.float32(0.0), "b": jnp.float32(1.0), "c": jnp.float32(1.0)}
    seen = ls.explain(loss, 8.0, params, jnp.ones(2))
    assert ("['c']", "['b']") == (
        seen.last_finite_gradient,
        seen.first_nonfinite_gradient,
    )
    assert ("backward", "second", "division by zero") == (
        seen.first.direction,
        seen.first.module,
        seen.first.origin,
    )
    assert "inf * 0" == seen.first_nan.origin


def test_a_mask_that_a_softmax_turns_into_zeros_is_not_a_fault():
    def loss(w, x):
        logits = jnp.where(jnp.array([True, False]), w * x, -jnp.inf)
        return jnp.log(jax.nn.softmax(logits)[0] * 0)

    seen = ls.explain(loss, 1.0, 1.0, jnp.ones(2))
    assert ("log of 0", "log") == (seen.first.origin, seen.first.operation)


def attend(w, x, mask):
    logits = (w * x) @ x.T + mask
    return jax.nn.softmax(logits) @ x


CAUSAL = np.where(np.tril(np.ones((3, 3))), 0.0, -np.inf).astype(np.float32)


def test_a_mask_given_as_an_argument_is_not_the_cause():
    x = jnp.ones((3, 2))

    def loss(w, x, mask):
        return jnp.log(attend(w, x, mask) * 0).mean()

    found = ls.explain(loss, 1.0, 1.0, x, jnp.asarray(CAUSAL)).first
    assert ("log of 0", "log") == (found.origin, found.operation)


def test_a_row_that_a_mask_given_as_an_argument_empties_is_the_cause():
    x, mask = jnp.ones((3, 2)), jnp.asarray(CAUSAL).at[1].set(-jnp.inf)
    seen = ls.explain(lambda *args: attend(*args).mean(), 1.0, 1.0, x, mask)
    assert ("row of -inf", "sub") == (seen.first.origin, seen.first.operation)


def test_minus_inf_in_the_batch_is_the_cause_where_a_product_reads_it():
    x = jnp.ones((3, 2)).at[0, 1].set(-jnp.inf)
    seen = ls.explain(lambda w, x: (x @ (w * jnp.eye(2))).sum(), 1.0, 1.0, x)
    assert ("batch", "argument 1") == (seen.first.origin, seen.first.tensor)
    assert "dot_general" == seen.first_nan.operation


def test_a_plain_function_has_no_model():
    def loss(w, x):
        return jnp.log(w * x)

    text = str(ls.explain(loss, 1.0, 1.0, jnp.float32(0.0)))
    line = loss.__code__.co_firstlineno + 1
    assert "outside the model" not in text
    seen = ls.explain(lambda w, x: loss(w, x) * 2, 1.0, 1.0, jnp.float32(0.0))
    assert f"the code at test_explain.py:{line}" in str(seen)
    assert "outside the model" in str(ls.explain(*outside_of_a_layer()))


def outside_of_a_layer():
    loss, args = bad_batch()
    return lambda p, x: jnp.log(loss(p, x * 0) * 0) * 2, 1.0, args[0], jnp.ones((2, 3))


def test_a_number_that_float16_rounds_to_0_is_named():
    def loss(w, x):
        return (x * w / jnp.sqrt((x * w).var() + 1e-8)).sum()

    seen = ls.explain(loss, 1.0, HALF(1.0), jnp.ones(3, HALF))
    assert seen.first.lost_epsilon is not None
    assert "is 0 in float16, whose smallest number is 6e-8" in seen.advice
    seen = ls.explain(lambda w, x: w / (x + 1 - 1), 1.0, HALF(1.0), HALF(0.0))
    assert seen.first.lost_epsilon is None


def test_a_finite_batch_has_nothing_to_explain():
    seen = ls.explain(lambda w, x: w * x, 1.0, 2.0, 3.0)
    assert seen.finite
    assert "nothing to explain" in str(seen)
    assert seen.first is None


def test_the_state_is_that_of_value_and_grad():
    loss, args = overflow_of_the_scale()
    policy = Dynamic(init_scale=2.0**15)
    seen = ls.explain(loss, ls.init(policy), *args)
    assert 2.0**15 == seen.scale


def test_a_debug_print_is_not_repeated(capfd):
    def loss(w):
        jax.debug.print("seen {}", w)
        return jnp.log(w)

    ls.explain(loss, 1.0, 0.0)
    jax.effects_barrier()
    # Once, in the compiled program.
    assert capfd.readouterr().out.count("seen") <= 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ls.explain(3, 1.0, 2.0), SettingTypeError, "loss function first"),
        (lambda: ls.explain(jnp.sum, 0.0, 2.0), SettingError, "scale"),
        (lambda: ls.explain(jnp.sum, (1, 2), 2.0), StateError, "ScaleState"),
        (lambda: ls.explain(jnp.sum, jnp.ones(2), 2.0), SettingTypeError, "one scale"),
        (lambda: ls.explain(jnp.sum, 1.0, 2), GradientError, "differentiate"),
        (lambda: ls.explain(jnp.sum, 1.0, 2.0, argnums=3), SettingError, "argnums"),
        (
            lambda: jax.jit(lambda x: ls.explain(jnp.sum, 1.0, x).scale)(2.0),
            ContextError,
            "inside jit",
        ),
    ],
)
def test_what_cannot_be_explained_is_one_error(call, error, words):
    with pytest.raises(error, match=words):
        call()
