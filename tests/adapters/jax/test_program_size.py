"""The size of a compiled step by the number of leaves, and its reads of gradients.

The time of a compilation is not asserted; the size of the program decides it.
"""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.extend.core import jaxprs_in_params  # noqa: E402

import lossscale.jax as ls  # noqa: E402
import lossscale.optax as lso  # noqa: E402
from lossscale import Dynamic  # noqa: E402

POLICY = Dynamic()


pytestmark = pytest.mark.usefixtures("standard_promotion")


def compute_loss(weights, x):
    return sum(jnp.sum(jnp.tanh(weight * x)) for weight in weights)


def make_weights(leaves):
    # Different shapes: equal computations would be shared.
    return [jnp.ones((8, 33 + index)) for index in range(leaves)]


def make_select_step(weights):
    def step(state, weights, x):
        result = ls.value_and_grad(compute_loss, POLICY)(state, weights, x)
        new = [w - 0.1 * grad for w, grad in zip(weights, result.grads, strict=True)]
        return ls.select(result.signal.finite, new, weights), result.state

    return step, (ls.init(POLICY), weights, 2.0)


def make_optax_step(weights):
    optimizer = lso.loss_scaled(optax.adam(0.1), POLICY)

    def step(state, weights, x):
        def scaled(weights):
            return lso.scale_loss(compute_loss(weights, x), state)

        updates, state = optimizer.update(jax.grad(scaled)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    return step, (optimizer.init(weights), weights, 2.0)


STEPS = pytest.mark.parametrize("make", [make_select_step, make_optax_step])


def list_equations(jaxpr):
    """Yield all equations of a jaxpr and of its inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from list_equations(inner)


@STEPS
def test_the_program_grows_in_proportion_to_the_leaves(make):
    """Every selection computed the flag: 3 times the leaves, more than 4 the size."""
    sizes = []
    for leaves in (8, 24):
        step, arguments = make(make_weights(leaves))
        text = jax.jit(step).lower(*arguments).compile().as_text()
        sizes.append(text.count(" = "))
    assert sizes[1] < 3.5 * sizes[0], sizes


@STEPS
def test_every_gradient_is_read_once_by_the_check(make):
    step, arguments = make(make_weights(6))
    jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    reads = [
        equation
        for equation in list_equations(jaxpr)
        if equation.primitive.name.startswith("reduce")
        and equation.invars[0].aval.size > 200
    ]
    reads_by_the_loss = 6
    assert 6 == len(reads) - reads_by_the_loss
