"""`lossscale.keras.explain`: planted faults on every backend, and what it leaves alone.

What a layer did is the same on every backend. The names of operations are not: those
are asserted for each.
"""

import numpy as np
import pytest
from helpers.keras_backend import BACKEND, QUIET, keras, numpy

from lossscale import Dynamic
from lossscale.errors import ContextError, SettingError, SettingTypeError
from lossscale.keras import LossScaleOptimizer, explain

pytestmark = QUIET
ops = keras.ops
X, Y = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)


class Between(keras.layers.Layer):
    """A layer that does anything."""

    def __init__(self, function, dtype="float32"):
        super().__init__(name="between", dtype=dtype)
        self._function = function

    def call(self, x):
        return self._function(x)


def make(between=None, *, kernel=1.0, dtype="float32", loss="mse", scale=1024.0):
    """Return a compiled model of two layers with something between them."""
    keras.utils.set_random_seed(0)
    middle = [] if between is None else [Between(between, dtype)]
    model = keras.Sequential(
        [
            keras.Input((3,), dtype=dtype),
            keras.layers.Dense(4, name="up", dtype=dtype),
            keras.layers.Dropout(0.5, dtype=dtype),
            *middle,
            keras.layers.Dense(2, name="down", dtype=dtype),
        ],
        name="net",
    )
    model.set_weights([np.full(w.shape, kernel) for w in model.get_weights()])
    policy = Dynamic(init_scale=scale)
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(), policy=policy), loss)
    model.optimizer.build(model.trainable_variables)
    return model


def mean_in_float32(target, predicted):
    return ops.mean(ops.cast(predicted, "float32"))


def large_loss(target, predicted):
    return ops.mean(ops.cast(predicted, "float32")) * 4096.0


def logarithm(target, predicted):
    return ops.mean(ops.log(predicted * 0))


def with_nan(shape):
    values = np.ones(shape, np.float32)
    values[1, 1] = np.nan
    return values


def mask(x):
    return ops.softmax(ops.where(x > 1e9, x, -np.inf))


def with_bad_weights():
    model = make()
    weights = model.get_weights()
    weights[2][0, 0] = np.inf
    model.set_weights(weights)
    return model


# On a CPU Keras computes float16 products on torch in float32, and casts them.
MM = {"tensorflow": "MatMul", "jax": "dot_general", "torch": "to"}
DIV = {"tensorflow": "RealDiv", "jax": "div", "torch": "div"}
CAST = {"tensorflow": "Cast", "jax": "convert_element_type", "torch": "to"}
SOFTMAX = {"tensorflow": "Softmax", "jax": "sub", "torch": "softmax"}
SAME = dict.fromkeys(("tensorflow", "jax", "torch"))


def called(name):
    return {"tensorflow": name.capitalize(), "jax": name, "torch": name}


FAULTS = {
    # the fault: model, batch, pass, layer, operation, what it did, a lower scale helps
    "forward overflow": (
        *(lambda: make(kernel=100.0, dtype="float16", loss=mean_in_float32), X * 500),
        *("forward", "net/up", MM, "overflow", False),
    ),
    "exponential": (
        *(lambda: make(ops.exp, kernel=4.0, dtype="float16", loss=mean_in_float32), X),
        *("forward", "net/between", called("exp"), "overflow", False),
    ),
    "the scale": (
        *(lambda: make(dtype="float16", loss=large_loss), X),
        *("backward", None, CAST, "overflow", True),
    ),
    "no epsilon": (
        *(lambda: make(lambda x: (x - x) / (x - x)), X),
        *("forward", "net/between", DIV, "0 / 0", False),
    ),
    "division": (
        *(lambda: make(lambda x: (x + 1) / (x * 0)), X),
        *("forward", "net/between", DIV, "division by zero", False),
    ),
    "root": (
        *(lambda: make(lambda x: ops.sqrt(-x - 1.0)), X),
        *("forward", "net/between", called("sqrt"), "root of a negative number", False),
    ),
    "negative logarithm": (
        *(lambda: make(lambda x: ops.log(-x - 1.0)), X),
        *("forward", "net/between", called("log"), "log of a negative number", False),
    ),
    "loss": (
        *(lambda: make(loss=logarithm), X),
        *("forward", None, called("log"), "log of 0", False),
    ),
    "masked row": (
        *(lambda: make(mask), X),
        *("forward", "net/between", SOFTMAX, "row of -inf", False),
    ),
    "bad batch": (
        *(make, with_nan((4, 3))),
        *("given", None, SAME, "batch", False),
    ),
    "bad weights": (
        *(with_bad_weights, X),
        *("given", None, SAME, "parameter", False),
    ),
    "gradient of a root": (
        *(lambda: make(lambda x: ops.sqrt(x * 0)), X),
        *("backward", "net/between", None, "division by zero", False),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_explained(name):
    build, x, direction, layer, operation, origin, helps = FAULTS[name]
    seen = explain(build(), x, Y)
    found = seen.first
    expected = direction, origin, helps
    assert expected == (found.direction, found.origin, seen.lower_scale_helps), seen
    if layer is not None:
        assert (layer, layer.split("/")[1].lower()) == (
            found.module,
            {"Dense": "up", "Between": "between"}[found.module_type],
        )
    if operation is not None:
        assert operation[BACKEND] == found.operation, str(seen)
    assert (direction == "backward") == seen.loss_finite
    assert not seen.finite


def test_the_damaged_weight_and_the_batch_are_named():
    assert "net/down/kernel" == explain(with_bad_weights(), X, Y).first.tensor
    if BACKEND != "torch":  # which has no names for tensors of a batch
        assert "x" == explain(make(), with_nan((4, 3)), Y).first.tensor


def test_a_lower_scale_that_is_advised_lets_a_step_be_applied():
    model = make(dtype="float16", loss=large_loss)
    seen = explain(model, X, Y)
    model.optimizer.dynamic_scale.assign(seen.helping_scale)
    model.train_on_batch(X, Y)
    assert 0 == int(numpy(model.optimizer.skipped_steps))


def snapshot(model):
    seeds = [
        generator.state
        for layer in model._flatten_layers()
        for generator in getattr(layer, "_seed_generators", ())
    ]
    listed = [
        *(*model.variables, *model.metrics_variables, *model.optimizer.variables),
        *seeds,
    ]
    assert seeds
    return [numpy(variable).tobytes() for variable in listed]


@pytest.mark.parametrize("name", ["the scale", "gradient of a root"])
def test_nothing_is_changed(name):
    build, x, *_ = FAULTS[name]
    model = build()
    model.train_on_batch(X * 0, Y)
    before = snapshot(model)
    methods = [dict(vars(layer)).get("call") for layer in model.layers]
    explain(model, x, Y)
    assert before == snapshot(model)
    assert methods == [dict(vars(layer)).get("call") for layer in model.layers]
    model.train_on_batch(X * 0, Y)  # the compiled step still runs


def test_nothing_is_changed_if_the_model_raises():
    model = make(lambda x: x / (1 if x.shape[1] == 4 else 0))
    before = snapshot(model)
    with pytest.raises(Exception, match=r".+"):
        explain(model, np.ones((4, 7), np.float32), Y)
    assert before == snapshot(model)


def test_a_finite_batch_has_nothing_to_explain():
    seen = explain(make(), X, Y)
    assert seen.finite
    assert "nothing to explain" in str(seen)


def test_the_scale_is_the_optimizer_s_or_the_one_given():
    assert 1024.0 == explain(make(), X, Y).scale
    assert 8.0 == explain(make(), X, Y, scale=8.0).scale
    model = make()
    model.compile("sgd", "mse")
    assert 1.0 == explain(model, X, Y).scale


@pytest.mark.parametrize("own", [True, False])
def test_before_the_first_batch_the_scale_is_the_one_to_start_with(own):
    scaled = LossScaleOptimizer if own else keras.optimizers.LossScaleOptimizer
    model = make(dtype="float16", loss=large_loss)
    model.compile(scaled(keras.optimizers.SGD(), initial_scale=2.0**40), large_loss)
    seen = explain(model, X, Y)
    assert 2.0**40 == seen.scale
    assert seen.lower_scale_helps
    assert not model.optimizer.built


def test_minus_inf_in_the_batch_is_the_cause():
    batch = X.copy()
    batch[1, 2] = -np.inf
    model = make(kernel=0.0)
    found = explain(model, batch, Y).first
    assert ("given", "batch") == (found.direction, found.origin)


def test_the_cast_of_the_model_s_inputs_is_the_model_s():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        layers = [keras.Input((3,)), keras.layers.Dense(2, dtype="float16")]
        model = keras.Sequential(layers, name="net")
    finally:
        keras.config.set_dtype_policy(before)
    model.compile("sgd", mean_in_float32)
    found = explain(model, 1e6 * X, Y).first
    assert ("net", "overflow", CAST[BACKEND]) == (
        found.module,
        found.origin,
        found.operation,
    )


def test_lines_are_never_those_of_keras():
    model = make(lambda x: x / (x * 0))
    line = explain(model, X, Y).first.line
    assert line is None or line.startswith("test_explain.py:")


def test_a_norm_without_epsilon_is_advised_to_have_one():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, kernel_initializer="zeros"),
            keras.layers.BatchNormalization(epsilon=0.0, name="norm"),
            keras.layers.Dense(2),
        ],
        name="net",
    )
    model.compile("sgd", "mse")
    seen = explain(model, X, Y)
    assert "net/norm" == seen.first.module
    assert seen.first.origin in ("division by zero", "0 / 0")
    assert "Set the norm's eps above 0." == seen.advice


def test_a_number_that_float16_rounds_to_0_is_said_to_be():
    def divide(x):
        return x / (ops.sqrt(ops.var(x) * 0 + 1e-8))

    model = make(divide, dtype="float16", loss=mean_in_float32)
    assert "is 0 in float16" in explain(model, X, Y).advice


def test_what_cannot_be_explained_is_one_error():
    with pytest.raises(SettingTypeError, match=r"keras\.Model"):
        explain(3, X, Y)
    with pytest.raises(ContextError, match="not built and compiled"):
        explain(keras.Sequential([keras.layers.Dense(1)]), X, Y)
    with pytest.raises(SettingError, match="scale"):
        explain(make(), X, Y, scale=0.0)
