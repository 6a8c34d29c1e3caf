"""Scaling losses; loops of one's own, as in Keras 3 and as in tf.keras."""

import numpy as np
import pytest
from helpers.keras_backend import BACKEND, QUIET, keras, numpy

from lossscale.errors import GradientError
from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

TINY = 2.0**-25  # a gradient that float16 makes 0 of


def optimizer_of(scale=2.0, inner=None, **arguments):
    return LossScaleOptimizer(inner or keras.optimizers.SGD(0.5), scale, **arguments)


def tensor(value, dtype="float32"):
    return keras.ops.convert_to_tensor(value, dtype)


def loss_gradient(function, variable):
    """The gradient of a scaled loss, taken by the backend."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = function(variable)
        return tape.gradient(loss, variable.value)
    if BACKEND == "jax":
        import jax

        return jax.grad(function)(variable.value)
    variable.value.grad = None
    function(variable).backward()
    return variable.value.grad


def test_a_loss_is_scaled_before_and_after_the_optimizer_is_built():
    optimizer = optimizer_of(8.0)
    assert 16.0 == numpy(optimizer.scale_loss(tensor(2.0)))
    optimizer.build([keras.Variable([1.0])])
    assert 16.0 == numpy(optimizer.scale_loss(tensor(2.0)))
    optimizer.dynamic_scale.assign(4.0)
    assert 8.0 == numpy(optimizer.scale_loss(tensor(2.0)))
    assert 8.0 == numpy(optimizer.scale_loss(2.0))
    assert 8.0 == numpy(optimizer.scale_loss(2))


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_of_half_precision_is_scaled_in_float32(dtype, built):
    optimizer = optimizer_of(2.0**15)
    if built:
        optimizer.build([keras.Variable([1.0])])
    scaled = optimizer.scale_loss(tensor(100.0, dtype))
    assert "float32" == keras.backend.standardize_dtype(scaled.dtype)
    assert 100.0 * 2.0**15 == numpy(scaled)


@pytest.mark.parametrize("value", [[1, 2], True, "loss", None])
def test_a_loss_that_is_not_floating_point_is_an_error(value):
    loss = tensor(value, "int32") if isinstance(value, list) else value
    with pytest.raises(GradientError, match="The loss is"):
        optimizer_of().scale_loss(loss)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_methods_of_tf_keras_scale_and_unscale(dtype):
    optimizer = optimizer_of(2.0)
    assert 10.0 == numpy(optimizer.get_scaled_loss(tensor(5.0, dtype)))
    assert 10.0 == numpy(optimizer.get_scaled_loss(lambda: tensor(5.0, dtype))())
    first, none, second = optimizer.get_unscaled_gradients(
        [tensor([3.0, -5.0], dtype), None, tensor([np.inf, np.nan], dtype)]
    )
    assert [1.5, -2.5] == numpy(first).tolist()
    assert none is None
    assert np.isnan(numpy(second)).all()


def classic(optimizer, variable, loss, between=lambda gradients: gradients):
    """One step of a loop written for tf.keras."""
    scaled = loss_gradient(lambda w: optimizer.get_scaled_loss(loss(w)), variable)
    gradients = optimizer.get_unscaled_gradients([scaled])
    gradients = between(gradients)
    optimizer.apply_gradients(zip(gradients, [variable], strict=True))


def test_the_loop_of_tf_keras_works_as_it_stands():
    optimizer = optimizer_of(2.0, dynamic_growth_steps=2)
    variable = keras.Variable([1.0, -2.0])
    expected = np.array([1.0, -2.0], np.float32)
    scales = []
    for step in range(6):
        bad = step == 3
        classic(
            optimizer,
            variable,
            lambda w, bad=bad: keras.ops.sum(w * w) * (np.inf if bad else 1.0),
        )
        if not bad:
            expected -= np.float32(0.5) * 2 * expected
        assert expected.tolist() == numpy(variable).tolist()
        scales.append(numpy(optimizer.dynamic_scale).item())
    assert [2.0, 4.0, 4.0, 2.0, 2.0, 4.0] == scales
    assert 5 == numpy(optimizer.iterations)


def test_gradients_may_be_clipped_between_unscaling_and_applying():
    def clip(gradients):
        return [keras.ops.clip(each, -1.0, 1.0) for each in gradients]

    optimizer = optimizer_of(1024.0)
    variable = keras.Variable([1.0, 1.0])
    weight = tensor([8.0, 0.5])
    classic(optimizer, variable, lambda w: keras.ops.sum(w * weight), clip)
    # The inner optimizer's rate is 0.5; clipped, the gradients are 1 and 0.5.
    assert [0.5, 0.75] == numpy(variable).tolist()
    # An infinity that was clipped to a number must not be applied.
    huge = tensor([np.inf, 0.5])
    classic(optimizer, variable, lambda w: keras.ops.sum(w * huge), clip)
    assert [0.5, 0.75] == numpy(variable).tolist()
    assert 512.0 == numpy(optimizer.dynamic_scale)


def test_gradients_may_be_unscaled_several_times_and_applied_once_or_more():
    optimizer = optimizer_of(4.0)
    first, second = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer.build([first, second])
    parts = [optimizer.get_unscaled_gradients([tensor([4.0 * n])]) for n in (1, 2)]
    both = parts[0][0] + parts[1][0]
    optimizer.apply([both, both], [first, second])
    assert [-0.5, -0.5] == [numpy(each).item() for each in (first, second)]
    optimizer.apply([both, both], [first, second])
    assert [-2.0, -2.0] == [numpy(each).item() for each in (first, second)]


def test_the_loop_of_keras_works_as_it_stands():
    optimizer = optimizer_of(2.0**15)
    variable = keras.Variable([1.0])
    gradient = loss_gradient(
        lambda w: optimizer.scale_loss(
            keras.ops.sum(
                keras.ops.cast(keras.ops.cast(w, "float16") * TINY, "float32")
            )
        ),
        variable,
    )
    optimizer.apply([gradient], [variable])
    assert [np.float32(1.0 - 0.5 * TINY)] == numpy(variable).tolist()


def test_scaled_gradients_after_unscaled_ones_are_an_error():
    optimizer = optimizer_of()
    variable = keras.Variable([1.0])
    classic(optimizer, variable, keras.ops.sum)
    with pytest.raises(GradientError, match="scale_loss was called"):
        optimizer.scale_loss(tensor(1.0))
    optimizer.get_scaled_loss(tensor(1.0))
    with pytest.raises(GradientError, match="gradients of a loss from get_scaled_loss"):
        optimizer.apply([tensor([1.0])], [variable])
    assert [0.5] == numpy(variable).tolist()


@pytest.mark.parametrize("call", ["scale_loss", "apply"])
def test_unscaled_gradients_after_scaled_ones_are_an_error(call):
    optimizer = optimizer_of()
    variable = keras.Variable([1.0])
    if call == "scale_loss":
        optimizer.scale_loss(tensor(1.0))
    else:
        optimizer.apply([tensor([2.0])], [variable])
    with pytest.raises(GradientError, match="has been given scaled gradients"):
        optimizer.get_unscaled_gradients([tensor([2.0])])


def test_a_loss_from_get_scaled_loss_goes_with_scaled_gradients_too():
    optimizer = optimizer_of(4.0)
    variable = keras.Variable([1.0])
    gradient = loss_gradient(
        lambda w: optimizer.get_scaled_loss(keras.ops.sum(w)), variable
    )
    optimizer.apply([gradient], [variable])
    assert [0.5] == numpy(variable).tolist()


def test_a_loop_is_changed_over_by_taking_the_optimizer_into_a_new_one():
    optimizer = optimizer_of(4.0)
    variable = keras.Variable([1.0])
    optimizer.apply([tensor([4.0])], [variable])
    taken = LossScaleOptimizer.from_keras(optimizer)
    classic(taken, variable, keras.ops.sum)
    assert [0.0] == numpy(variable).tolist()
    assert 2 == numpy(taken.iterations)


def test_an_integer_gradient_cannot_be_unscaled():
    with pytest.raises(GradientError, match="The gradient is int32, expected float16"):
        optimizer_of().get_unscaled_gradients([tensor([1], "int32")])


def test_two_losses_may_be_scaled_before_the_first_gradients_are_applied():
    optimizer = optimizer_of()
    variable = keras.Variable([1.0])
    classic(optimizer, variable, keras.ops.sum)
    gradients = optimizer.get_unscaled_gradients([tensor([0.0])])
    optimizer.get_scaled_loss(tensor(1.0))  # of another loss
    optimizer.apply(gradients, [variable])
    assert [0.5] == numpy(variable).tolist()


def test_values_that_overwrite_a_variable_are_not_unscaled_in_either_loop():
    optimizer = optimizer_of()
    variable = keras.Variable([1.0, 1.0])
    variable.overwrite_with_gradient = True
    optimizer.build([variable])
    gradients = optimizer.get_unscaled_gradients([tensor([7.0, 7.0])])
    optimizer.apply(gradients, [variable])
    assert [7.0, 7.0] == numpy(variable).tolist()
