"""`lossscale.testing.keras.inject`: in `fit`, on every backend."""

import itertools

import numpy as np
import pytest
from helpers.keras_backend import QUIET, keras, numpy

from lossscale.errors import ContextError, SettingError, SettingTypeError
from lossscale.keras import LossScaleOptimizer
from lossscale.testing.keras import inject

pytestmark = QUIET

X, Y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)]
    )
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
    return model


def path_of(model, index):
    return model.trainable_variables[index].path


def kernel_of(model):
    return numpy(model.trainable_variables[0])


@pytest.mark.parametrize("kind", ["inf", "nan"])
def test_fit_skips_the_steps_with_a_fault_and_no_other(model, kind):
    settings = {"batch_size": 2, "epochs": 2, "verbose": 0}
    model.fit(X, Y, **settings)
    with inject(model, path_of(model, 2), kind, steps=[3, 8], element=1):
        model.fit(X, Y, **settings)
    assert 2 == int(model.optimizer.skipped_steps)
    assert 1 == int(model.optimizer.consecutive_skips)
    # Without the context, the step is compiled without the fault.
    model.fit(X, Y, **settings)
    assert 2 == int(model.optimizer.skipped_steps)
    assert "apply" not in vars(model.optimizer)


def test_the_fault_is_written_at_its_steps(model):
    kernels = [kernel_of(model)]
    with inject(model, path_of(model, 2), "nan", steps=[2, 4], element=None):
        for _ in range(5):
            model.train_on_batch(X, Y)
            kernels.append(kernel_of(model))
    same = [np.array_equal(a, b) for a, b in itertools.pairwise(kernels)]
    assert [False, True, False, True, False] == same


def test_a_plain_optimizer_takes_the_fault(model):
    model.compile(keras.optimizers.SGD(0.01), "mse")
    with inject(model, path_of(model, 0), "inf", steps=2, element=None):
        model.train_on_batch(X, Y)
        assert np.isfinite(kernel_of(model)).all()
        model.train_on_batch(X, Y)
    assert not np.isfinite(kernel_of(model)).any()


def test_a_fault_that_was_never_written_is_an_error(model):
    with (
        pytest.raises(ContextError, match=r"at steps \[2\], and there were 1"),
        inject(model, path_of(model, 0), "inf", steps=2),
    ):
        model.train_on_batch(X, Y)


def test_a_context_is_not_entered_twice(model):
    with inject(model, path_of(model, 0), "inf", steps=1):
        with (
            pytest.raises(ContextError, match="already"),
            inject(model, path_of(model, 1), "inf", steps=1),
        ):
            pass
        model.train_on_batch(X, Y)


def test_what_cannot_be_injected_is_one_error(model):
    path = path_of(model, 0)
    with pytest.raises(SettingError, match="Did you mean"):
        inject(model, path[:-1], "inf", steps=1)
    with pytest.raises(SettingError, match="has 6 numbers"):
        inject(model, path, "inf", steps=1, element=6)
    with pytest.raises(SettingTypeError, match=r"keras\.Model"):
        inject(model.optimizer, path, "inf", steps=1)
    with pytest.raises(ContextError, match="not built and compiled"):
        inject(keras.Sequential([keras.layers.Dense(1)]), "a", "inf", steps=1)
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    with (
        pytest.raises(ContextError, match=r"lossscale\.keras\.LossScaleOptimizer"),
        inject(model, path, "inf", steps=1),
    ):
        pass
    assert "apply" not in vars(model.optimizer)


@pytest.mark.parametrize("kind", ["inf", "nan"])
def test_fit_skips_the_steps_whose_activations_have_a_fault(model, kind):
    settings = {"batch_size": 2, "epochs": 2, "verbose": 0}
    first = model.layers[0].name
    with inject(model, first, kind, steps=[3, 8], where="output", element=1):
        model.fit(X, Y, **settings)
    assert 2 == int(model.optimizer.skipped_steps)
    assert 1 == int(model.optimizer.consecutive_skips)
    assert all(np.isfinite(numpy(weight)).all() for weight in model.weights)
    # Without the context neither the fault nor the counter is left.
    model.fit(X, Y, **settings)
    assert 2 == int(model.optimizer.skipped_steps)
    assert "call" not in vars(model.layers[0])
    assert [] == model.non_trainable_variables


def test_the_activation_is_written_at_its_steps_and_not_in_evaluation(model):
    model.compile(keras.optimizers.SGD(0.0), "mae")
    losses = []
    with inject(model, model.layers[1].name, 7.0, steps=2, where="output", element=0):
        assert 7.0 not in model.predict(X, verbose=0)
        for _ in range(3):
            before = model.predict(X, verbose=0)
            losses.append(float(model.train_on_batch(X, Y)))
            model.reset_metrics()
    plain = np.abs(before).mean()
    spoilt = (np.abs(before).sum() - abs(before[0, 0]) + 7.0) / len(X)
    assert [plain, spoilt, plain] == pytest.approx(losses, rel=1e-5)


def test_the_gradient_passes_as_if_nothing_had_been_written():
    """With a linear loss it does not depend on the activation that was written."""
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(keras.optimizers.SGD(0.5), lambda y, out: keras.ops.sum(out))
    with inject(model, dense.name, 7.0, steps=2, where="output"):
        for _ in range(3):
            model.train_on_batch(X[:1], Y[:1])
    assert [[-1.5]] * 3 == kernel_of(model).tolist()


def test_a_layer_inside_another_is_named_with_it():
    block = keras.Sequential([keras.layers.Dense(2, name="inner")], name="block")
    model = keras.Sequential([keras.Input((3,)), block, keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
    with inject(model, "block/inner", "nan", steps=1, where="output"):
        model.train_on_batch(X, Y)
    assert 1 == int(model.optimizer.skipped_steps)
    with pytest.raises(SettingError, match="among the layers"):
        inject(model, "inner", "nan", steps=1, where="output")


def test_an_activation_that_was_never_written_is_an_error(model):
    name = model.layers[0].name
    with (
        pytest.raises(ContextError, match=r"at steps \[2\], and there were 1"),
        inject(model, name, "inf", steps=2, where="output"),
    ):
        model.train_on_batch(X, Y)
    with inject(model, name, "inf", steps=1, where="output"):
        with (
            pytest.raises(ContextError, match="already"),
            inject(model, name, "inf", steps=1, where="output"),
        ):
            pass
        model.train_on_batch(X, Y)
