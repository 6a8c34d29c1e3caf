"""How large a compiled step becomes with the number of leaves, and how often it reads.

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


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_of(weights, x):
    return sum(jnp.sum(jnp.tanh(weight * x)) for weight in weights)


def weights_of(leaves):
    # Different shapes: equal computations would be shared.
    return [jnp.ones((8, 33 + index)) for index in range(leaves)]


def by_selecting(weights):
    def step(state, weights, x):
        found = ls.value_and_grad(loss_of, POLICY)(state, weights, x)
        new = [w - 0.1 * grad for w, grad in zip(weights, found.grads, strict=True)]
        return ls.select(found.signal.finite, new, weights), found.state

    return step, (ls.init(POLICY), weights, 2.0)


def by_optax(weights):
    optimizer = lso.loss_scaled(optax.adam(0.1), POLICY)

    def step(state, weights, x):
        def scaled(weights):
            return lso.scale_loss(loss_of(weights, x), state)

        updates, state = optimizer.update(jax.grad(scaled)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    return step, (optimizer.init(weights), weights, 2.0)


STEPS = pytest.mark.parametrize("make", [by_selecting, by_optax])


def equations(jaxpr):
    """Yield all equations of a jaxpr, and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inside in jaxprs_in_params(equation.params):
            yield from equations(inside)


@STEPS
def test_the_program_grows_in_proportion_to_the_leaves(make):
    """The flag was computed again in every choice: four times the leaves, 9 times."""
    sizes = []
    for leaves in (12, 48):
        step, arguments = make(weights_of(leaves))
        text = jax.jit(step).lower(*arguments).compile().as_text()
        sizes.append(text.count(" = "))
    assert sizes[1] < 5 * sizes[0]


@STEPS
def test_every_gradient_is_read_once_by_the_check(make):
    step, arguments = make(weights_of(6))
    jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    reads = [
        equation
        for equation in equations(jaxpr)
        if equation.primitive.name.startswith("reduce")
        and equation.invars[0].aval.size > 200
    ]
    of_the_loss = 6
    assert 6 == len(reads) - of_the_loss
