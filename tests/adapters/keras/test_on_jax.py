"""JAX: scales that live through `jit`, in loops of one's own and in `fit`."""

import numpy as np
import pytest
from helpers.keras_backend import BACKEND, QUIET, keras, numpy

if BACKEND != "jax":
    pytest.skip(f"needs the jax backend, this is {BACKEND}", allow_module_level=True)

import jax
import jax.numpy as jnp

from lossscale.errors import GradientError
from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

Original = keras.optimizers.LossScaleOptimizer


def place_of(optimizer, name):
    return [each.name for each in optimizer.variables].index(name)


def built(make=LossScaleOptimizer, scale=8.0, interval=2):
    optimizer = make(keras.optimizers.SGD(0.5), scale, interval)
    optimizer.build([keras.Variable([1.0, 2.0])])
    return optimizer, [each.value for each in optimizer.variables]


def run(optimizer, variables, scale_loss, factors):
    """Train under jit: the loss is the weights times a factor, so is the gradient."""

    @jax.jit
    def step(weights, variables, factor):
        def loss(weights):
            return scale_loss(variables, jnp.sum(weights) * factor)

        gradients = jax.grad(loss)(weights)
        return optimizer.stateless_apply(variables, [gradients], [weights])

    weights, seen = jnp.zeros(2), []
    place = place_of(optimizer, "dynamic_scale")
    for factor in factors:
        (weights,), variables = step(weights, variables, factor)
        seen.append((float(variables[place]), weights.tolist()))
    return seen


def test_a_loop_under_jit_uses_the_live_scale():
    optimizer, variables = built()
    seen = run(
        optimizer,
        variables,
        optimizer.stateless_scale_loss,
        [1.0, 1.0, np.inf, np.inf, np.inf, 1.0, 2.0],
    )
    assert [8.0, 16.0, 8.0, 4.0, 2.0, 2.0, 4.0] == [scale for scale, _ in seen]
    assert [[-0.5] * 2, *[[-1.0] * 2] * 4, [-1.5] * 2, [-2.5] * 2] == [
        weights for _, weights in seen
    ]


def test_a_scope_with_the_live_variables_does_as_well():
    optimizer, variables = built()

    def scale_loss(variables, loss):
        mapping = list(zip(optimizer.variables, variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.scale_loss(loss)

    seen = run(optimizer, variables, scale_loss, [1.0, 1.0, 1.0, np.inf, 1.0])
    assert [8.0, 16.0, 16.0, 8.0, 8.0] == [scale for scale, _ in seen]
    assert [-2.0, -2.0] == seen[-1][1]


def test_keras_builds_the_scale_of_the_first_step_into_the_program():
    optimizer, variables = built(Original)
    seen = run(
        optimizer, variables, lambda _, loss: optimizer.scale_loss(loss), [1.0] * 4
    )
    # Steps 3 and 4 are scaled by 8 and unscaled by 16: half of what they should be.
    assert [-1.0 - 0.25 * 2] * 2 == seen[-1][1]


@pytest.mark.parametrize("kind", ["plain", "constant scope", "not built", "classic"])
def test_a_scale_that_would_be_built_in_is_an_error(kind):
    optimizer, variables = built()
    if kind == "not built":
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)

    def scale_loss(_, loss):
        if kind == "constant scope":
            mapping = list(zip(optimizer.variables, variables, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return optimizer.scale_loss(loss)
        if kind == "classic":
            return optimizer.get_scaled_loss(loss)
        return optimizer.scale_loss(loss)

    with pytest.raises(GradientError, match=r"stateless_scale_loss\(optimizer_var"):
        jax.jit(lambda loss: scale_loss(None, loss))(1.0)
    with pytest.raises(GradientError, match="was called while"):
        jax.jit(jax.grad(lambda loss: scale_loss(None, loss)))(1.0)


def test_gradients_cannot_be_unscaled_by_a_scale_that_would_be_built_in():
    optimizer, _ = built()
    with pytest.raises(GradientError, match="get_unscaled_gradients was called while"):
        jax.jit(lambda g: optimizer.get_unscaled_gradients([g]))(jnp.ones(2))


def test_outside_of_jit_the_scale_is_the_one_of_now():
    optimizer, _ = built()
    gradient = jax.grad(optimizer.scale_loss)
    assert 8.0 == gradient(1.0)
    optimizer.dynamic_scale.assign(4.0)
    assert 4.0 == gradient(1.0)


def test_the_scale_is_read_from_the_variables_that_are_given():
    optimizer, variables = built()
    variables[place_of(optimizer, "dynamic_scale")] = jnp.float32(32.0)
    assert 64.0 == optimizer.stateless_scale_loss(variables, 2.0)
    assert 64.0 == jax.jit(optimizer.stateless_scale_loss)(variables, 2.0)
    with pytest.raises(ValueError, match="must hold one value"):
        optimizer.stateless_scale_loss(variables[1:], 2.0)
    with pytest.raises(ValueError, match="must be built"):
        LossScaleOptimizer(keras.optimizers.SGD()).stateless_scale_loss([], 2.0)


def test_stateful_apply_inside_jit_is_an_error_and_leaks_nothing():
    variable = keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    optimizer.build([variable])
    with pytest.raises(GradientError, match="stateless_apply"):
        jax.jit(lambda g: optimizer.apply([g], [variable]))(jnp.ones(2))
    optimizer.apply([jnp.full(2, 8.0)], [variable])
    assert [0.5, 1.5] == numpy(variable).tolist()


def test_stateful_apply_inside_a_scope_collects_the_new_values():
    variable = keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    optimizer.build([variable])
    everything = [variable, *optimizer.variables]

    @jax.jit
    def step(values, gradient):
        mapping = list(zip(everything, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            optimizer.apply([gradient], [variable])
        return [scope.get_current_value(each) for each in everything]

    values = step([each.value for each in everything], jnp.full(2, 8.0))
    values = step(values, jnp.full(2, jnp.inf))
    assert [0.5, 1.5] == values[0].tolist()
    assert 4.0 == values[1 + place_of(optimizer, "dynamic_scale")]
    assert [1.0, 2.0] == numpy(variable).tolist()


def test_a_loop_of_unscaled_gradients_cannot_go_on_statelessly():
    optimizer, variables = built()
    optimizer.get_unscaled_gradients([jnp.ones(2)])
    with pytest.raises(GradientError, match="stateless_apply takes scaled gradients"):
        optimizer.stateless_apply(variables, [jnp.ones(2)], [jnp.ones(2)])


def test_a_step_compiles_to_one_branch():
    optimizer, variables = built()
    text = (
        jax.jit(optimizer.stateless_apply)
        .lower(variables, [jnp.ones(2)], [jnp.ones(2)])
        .as_text()
    )
    assert 1 == text.count("stablehlo.case") + text.count("stablehlo.if")
    theirs, variables = built(Original)
    text = (
        jax.jit(theirs.stateless_apply)
        .lower(variables, [jnp.ones(2)], [jnp.ones(2)])
        .as_text()
    )
    assert 2 == text.count("stablehlo.case") + text.count("stablehlo.if")


def test_a_step_runs_in_scan():
    optimizer, variables = built()

    def body(carry, factor):
        weights, variables = carry
        loss = jax.grad(
            lambda w: optimizer.stateless_scale_loss(variables, jnp.sum(w) * factor)
        )
        (weights,), variables = optimizer.stateless_apply(
            variables, [loss(weights)], [weights]
        )
        return (weights, variables), weights

    factors = jnp.array([1.0, 1.0, np.inf, 1.0])
    (_, variables), seen = jax.lax.scan(body, (jnp.zeros(2), variables), factors)
    assert [-0.5, -1.0, -1.0, -1.5] == seen[:, 0].tolist()
    assert 8.0 == variables[place_of(optimizer, "dynamic_scale")]


def test_a_variable_that_is_given_twice_is_refused():
    from lossscale.errors import StructureError

    variable = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0)
    optimizer.build([variable])
    gradient = keras.ops.convert_to_tensor([1.0])
    with pytest.raises(StructureError, match="twice"):
        optimizer.apply([gradient, gradient], [variable, variable])
    assert [1.0] == numpy(variable).tolist()
