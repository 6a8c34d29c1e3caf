"""Training with `fit`, under `mixed_float16`, and Keras's callbacks with it."""

import csv

import numpy as np
import pytest
from helpers.keras_backend import BACKEND, QUIET, keras, numpy, only_on
from helpers.keras_steps import Steps, check_finite

from lossscale import Dynamic
from lossscale.errors import SettingError, SettingTypeError, StructureError
from lossscale.keras import LossScaleLogger, LossScaleOptimizer

pytestmark = QUIET

Original = keras.optimizers.LossScaleOptimizer
NUMBERS = np.random.default_rng(0)
ROWS = NUMBERS.normal(size=(64, 8)).astype(np.float32)
TARGETS = (ROWS @ NUMBERS.normal(size=(8, 3))).astype(np.float32)
# torch.compile takes half a minute for this; one test of torch's own uses it.
COMPILED = [False] if BACKEND == "torch" else [False, True]


def network(optimizer, *, jit_compile=False, policy="mixed_float16", **arguments):
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(3, dtype="float32"),
        ]
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile, **arguments)
    return model


def fit(model, epochs=1, **arguments):
    settings = {"batch_size": 8, "epochs": epochs, "verbose": 0, "shuffle": False}
    return model.fit(ROWS, TARGETS, **settings, **arguments).history


@pytest.mark.parametrize("jit_compile", COMPILED)
def test_fit_crosses_overflows_and_growths_and_learns(jit_compile):
    policy = Dynamic(init_scale=2.0**24, growth_interval=5)
    model = network(
        LossScaleOptimizer(keras.optimizers.Adam(0.01), policy=policy),
        jit_compile=jit_compile,
    )
    history = fit(model, 20, callbacks=[LossScaleLogger()])
    assert history["loss"][-1] < history["loss"][0] / 4
    skipped = sum(history["skipped_steps"])
    assert skipped >= 4
    assert 20 * 8 == skipped + int(numpy(model.optimizer.iterations))
    grew = np.diff(history["loss_scale"]) > 0
    assert grew.any()
    check_finite([numpy(each) for each in model.weights])


# On JAX without jit, Keras compiles the update at every step and this class runs it as
# it is, which rounds differently.
@pytest.mark.parametrize("jit_compile", [True] if BACKEND == "jax" else COMPILED)
def test_fit_gives_the_weights_of_keras_own_class_bit_for_bit(jit_compile):
    weights = []
    for make in (Original, LossScaleOptimizer):
        optimizer = make(keras.optimizers.Adam(0.01), 2.0**24, 5)
        model = network(optimizer, jit_compile=jit_compile)
        fit(model, 6)
        state = numpy(optimizer.dynamic_scale), numpy(optimizer.step_counter)
        weights.append([*(numpy(each) for each in model.weights), *state])
    for want, have in zip(*weights, strict=True):
        assert want.tobytes() == have.tobytes()


def test_compile_does_not_wrap_it_again():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01))
    assert optimizer is network(optimizer).optimizer


def test_the_reported_loss_is_not_scaled():
    losses = []
    for optimizer in (
        keras.optimizers.SGD(0.0),
        LossScaleOptimizer(keras.optimizers.SGD(0.0), 2.0**12),
    ):
        model = network(optimizer, policy="float32")
        losses += [fit(model)["loss"][0], float(model.train_on_batch(ROWS, TARGETS))]
    assert np.allclose(losses[:2], losses[2:], rtol=1e-6, atol=0)


def test_train_on_batch_takes_a_step():
    model = network(LossScaleOptimizer(keras.optimizers.SGD(0.01), 8.0, 1))
    model.train_on_batch(ROWS, TARGETS)
    model.train_on_batch(np.full_like(ROWS, np.inf), TARGETS)
    assert 1 == numpy(model.optimizer.iterations)
    assert 8.0 == numpy(model.optimizer.dynamic_scale)
    report = model.optimizer.last_step
    assert numpy(report.skipped)
    assert 16.0 == numpy(report.scale)


def test_the_logs_say_what_happened_in_each_epoch(tmp_path):
    policy = Dynamic(init_scale=8.0, growth_interval=4)
    model = network(LossScaleOptimizer(keras.optimizers.SGD(0.001), policy=policy))
    broken = ROWS.copy()
    broken[24:40] = np.nan  # batches 4 and 5 of 8
    path = tmp_path / "log.csv"
    history = model.fit(
        broken,
        TARGETS,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[LossScaleLogger(), keras.callbacks.CSVLogger(path)],
    ).history
    # 3 clean, 2 skipped, 3 clean; then 1 clean, which grows, and the same again.
    assert [2.0, 1.0] == history["loss_scale"]
    assert [2, 2] == history["skipped_steps"]
    assert [0, 0] == history["consecutive_skips"]
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert ["2.0", "1.0"] == [row["loss_scale"] for row in rows]
    assert 4 == numpy(model.optimizer.skipped_steps)


class Recorder(keras.callbacks.Callback):
    """Keeps the logs of batches."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append((batch, dict(logs)))


def test_the_logs_of_every_few_batches_have_it_too():
    policy = Dynamic(init_scale=8.0, growth_interval=2)
    model = network(LossScaleOptimizer(keras.optimizers.SGD(0.001), policy=policy))
    recorder = Recorder()
    fit(model, callbacks=[LossScaleLogger(every=3), recorder])
    scales = {
        b: logs["loss_scale"] for b, logs in recorder.rows if "loss_scale" in logs
    }
    assert {2: 16.0, 5: 64.0} == scales
    assert 8.0 * 2**4 == numpy(model.optimizer.dynamic_scale)


@only_on("tensorflow", "jax")
def test_several_steps_in_one_call_are_logged_once():
    policy = Dynamic(init_scale=8.0, growth_interval=2)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.001), policy=policy)
    model = network(optimizer, steps_per_execution=4)
    recorder = Recorder()
    fit(model, callbacks=[LossScaleLogger(every=3), recorder])
    scales = [logs.get("loss_scale") for _, logs in recorder.rows]
    assert [32.0, 128.0] == scales


def test_a_run_of_skipped_steps_is_warned_about_once():
    model = network(LossScaleOptimizer(keras.optimizers.SGD(0.001)))
    logger = LossScaleLogger(every=2, warn_after=4)
    with pytest.warns(RuntimeWarning, match="4 steps in a row were skipped") as seen:
        model.fit(
            np.full_like(ROWS, np.nan),
            TARGETS,
            batch_size=8,
            verbose=0,
            callbacks=[logger],
        )
    assert 1 == sum("in a row" in str(each.message) for each in seen)


def test_the_logger_needs_this_optimizer():
    model = network(keras.optimizers.SGD(0.01))
    with pytest.raises(SettingTypeError, match="the model has LossScaleOptimizer"):
        fit(model, callbacks=[LossScaleLogger()])
    with pytest.raises(SettingError, match="every must be a whole number"):
        LossScaleLogger(every=0)


@only_on("jax")
def test_a_report_read_while_fit_on_jax_holds_the_variables_is_an_error():
    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with pytest.raises(StructureError, match=r"self\.model returns them"):
                _ = optimizer.last_step
            self.seen = numpy(self.model.optimizer.last_step.scale)

    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.001), 8.0, 2)
    reader = Reader()
    fit(network(optimizer), callbacks=[reader])
    assert 64.0 == reader.seen


def test_ema_weights_are_swapped_through_it():
    inner = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5)
    model = network(LossScaleOptimizer(inner, 2.0**10), policy="float32")
    plain = network(
        keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5), policy="float32"
    )
    for each in (model, plain):
        each.fit(
            ROWS,
            TARGETS,
            batch_size=8,
            epochs=2,
            verbose=0,
            shuffle=False,
            validation_data=(ROWS, TARGETS),
            callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        )
    for want, have in zip(plain.weights, model.weights, strict=True):
        assert np.allclose(numpy(want), numpy(have), rtol=1e-5, atol=1e-6)


def test_finalizing_overwrites_weights_with_their_average():
    inner = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    steps = Steps(LossScaleOptimizer(inner, 4.0), np.zeros(1))
    for gradient in (4.0, np.inf, 2.0):
        steps.step(np.array([gradient], np.float32))
    assert [-2.0] == steps.weights()[0].tolist()
    steps.optimizer.finalize_variable_values(steps.variables)
    assert [-1.5] == steps.weights()[0].tolist()


def test_a_learning_rate_schedule_does_not_move_on_a_skipped_step():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
    steps = Steps(LossScaleOptimizer(keras.optimizers.SGD(schedule), 1.0), np.zeros(1))
    for gradient in (np.inf, np.inf, 1.0, 1.0):
        steps.step(np.array([gradient * steps.scale()], np.float32))
    assert [-1.5] == steps.weights()[0].tolist()


def test_weight_decay_is_not_applied_on_a_skipped_step():
    inner = keras.optimizers.SGD(1.0, weight_decay=0.5)
    steps = Steps(LossScaleOptimizer(inner, 1.0), np.ones(1))
    steps.step(np.array([np.nan], np.float32))
    assert [1.0] == steps.weights()[0].tolist()
    steps.step(np.array([0.0], np.float32))
    assert [0.5] == steps.weights()[0].tolist()


def test_a_bad_micro_batch_is_replaced_by_the_next():
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    steps = Steps(LossScaleOptimizer(inner, 1.0), np.zeros(1))
    for gradient in (2.0, np.inf, 4.0):
        steps.step(np.array([gradient * steps.scale()], np.float32))
    assert [-3.0] == steps.weights()[0].tolist()
    assert 1 == steps.iterations()


@pytest.mark.parametrize("use_ema", [False, True])
def test_fit_ends_with_accumulated_micro_batches(use_ema):
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, use_ema=use_ema)
    optimizer = LossScaleOptimizer(inner, 8.0)
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, loss=lambda y, x: x)
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=1, epochs=1, verbose=0)
    assert 2 == int(numpy(optimizer.iterations))
    assert use_ema or [[-2.0]] == numpy(layer.kernel).tolist()


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="this version of Keras has no MultiOptimizer",
)
def test_several_optimizers_are_wrapped_as_one():
    optimizers = keras.optimizers
    slow, fast = optimizers.SGD(0.5), optimizers.SGD(2.0)
    chosen = optimizers.OptimizerMap(slow)
    chosen["fast.*"] = fast
    optimizer = LossScaleOptimizer(optimizers.MultiOptimizer(chosen), 8.0)
    variables = [
        keras.Variable([0.0], name="slow_one"),
        keras.Variable([0.0], name="fast_one"),
    ]
    optimizer.build(variables)
    for gradient in (8.0, np.inf, 4.0):
        tensor = keras.ops.convert_to_tensor([gradient])
        optimizer.apply([tensor, tensor], variables)
    assert [-1.0, -4.0] == [numpy(each).item() for each in variables]
    assert (4.0, 2) == (numpy(optimizer.dynamic_scale), numpy(optimizer.iterations))
    huge = keras.ops.convert_to_tensor([3e38])
    fast.global_clipnorm = 1.0
    optimizer.apply([huge, huge], variables)
    check_finite([numpy(each) for each in variables])


def test_float8_layers_train():
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, dtype="float8_from_mixed_bfloat16"),
            keras.layers.Dense(3),
        ]
    )
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**6)
    model.compile(optimizer, "mse", jit_compile=False)
    history = fit(model, 10)
    assert history["loss"][-1] < history["loss"][0] / 2
    check_finite([numpy(each) for each in model.weights])


def test_an_embedding_trains():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(20, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(0.05), 2.0**10), "mse")
    words = NUMBERS.integers(0, 20, size=(64, 5))
    goal = (words.sum(axis=1, keepdims=True) / 50).astype(np.float32)
    history = model.fit(words, goal, epochs=15, verbose=0, shuffle=False).history
    assert history["loss"][-1] < history["loss"][0] / 2
    assert 15 * 2 == numpy(model.optimizer.iterations)
