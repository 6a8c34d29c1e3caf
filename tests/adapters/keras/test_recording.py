"""`fit` recorded by a callback, on every backend."""

import numpy as np
import pytest
from helpers.keras_backend import QUIET, keras

from lossscale import Dynamic
from lossscale.diagnostics import Recorder, read_run
from lossscale.diagnostics.loggers import KerasCallback, StepWriter
from lossscale.errors import SettingTypeError
from lossscale.keras import LossScaleOptimizer
from lossscale.testing.keras import inject

pytestmark = QUIET

ROWS = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)


def fit(optimizer, callback, bad="inf"):
    """Fit five batches; in the third the gradient of the kernel has a fault."""
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", jit_compile=False)
    settings = {"batch_size": 8, "verbose": 0, "callbacks": [callback]}
    with inject(model, model.trainable_variables[0].path, bad, steps=3):
        model.fit(ROWS, ROWS[:, :2], **settings)


def test_every_batch_is_a_step(tmp_path):
    policy = Dynamic(init_scale=1024.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=policy)
    with Recorder(tmp_path / "run.jsonl", policy=policy) as recorder:
        fit(optimizer, KerasCallback(recorder))
    found = list(read_run(tmp_path / "run.jsonl").records())
    assert [1, 2, 3, 4, 5] == [record.step for record in found]
    assert [True, True, False, True, True] == [record.applied for record in found]
    assert [1024.0, 1024.0, 1024.0, 512.0, 512.0] == [r.scale for r in found]
    assert np.isfinite(found[1].loss)


def test_a_skipped_batch_is_recorded_with_its_cause_and_its_variables(tmp_path):
    policy = Dynamic(init_scale=1024.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=policy)
    written = []

    class Kept(StepWriter):
        def write_step(self, record):
            written.append(record)

    with Recorder(tmp_path / "run.jsonl") as recorder:
        fit(optimizer, KerasCallback(recorder, writers=[Kept()]), bad="nan")
    (found,) = (r for r in read_run(tmp_path / "run.jsonl").records() if r.skipped)
    kernel, _ = optimizer.inner_optimizer._trainable_variables
    for record in (found, written[2]):
        assert (3, "nan") == (record.step, record.cause)
        assert {kernel.path: "nan"} == dict(record.nonfinite)


@pytest.mark.parametrize(("every", "cause"), [(1, "loss"), (2, "nan")])
def test_a_batch_is_skipped_for_its_loss_if_that_was_not_finite(tmp_path, every, cause):
    """The loss of two batches does not say which of them was skipped for it."""
    rows = ROWS.copy()
    rows[9] = np.nan  # in the second batch
    model, path = compiled_model(), tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        callback = KerasCallback(recorder, every=every)
        settings = {"batch_size": 8, "shuffle": False, "verbose": 0}
        model.fit(rows, rows[:, :2], callbacks=[callback], **settings)
    (skipped,) = (r for r in read_run(path).records() if r.skipped)
    assert (2, cause) == (skipped.step, skipped.cause)
    assert np.isnan(skipped.loss)
    assert {"nan"} == {kind for _, kind in skipped.nonfinite}


def means_and_batches(model, **settings):
    """Fit, and return Keras's running means and the loss of every batch by itself."""
    means, alone = [], []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rows = ROWS[8 * batch : 8 * (batch + 1)]
            found = np.asarray(keras.ops.convert_to_numpy(model(rows)), np.float64)
            alone.append(float(np.mean((found - rows[:, :2]) ** 2)))

        def on_train_batch_end(self, batch, logs=None):
            means.append(logs["loss"])

    callbacks = [*settings.pop("callbacks"), Watch()]
    model.fit(ROWS, ROWS[:, :2], callbacks=callbacks, verbose=0, **settings)
    return means, alone


def compiled_model():
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=256.0)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def test_the_loss_is_that_of_the_batch_and_not_kerass_mean(tmp_path):
    """40 rows in batches of 8; of 36, the last batch has 4."""
    model, path = compiled_model(), tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        callback = KerasCallback(recorder)
        means, alone = means_and_batches(
            model, batch_size=8, epochs=2, shuffle=False, callbacks=[callback]
        )
    found = list(read_run(path).records())
    assert alone == pytest.approx([record.loss for record in found], rel=1e-4)
    assert means[3] != pytest.approx(found[3].loss, rel=1e-3)
    assert [0.05] * 10 == pytest.approx([record.lr for record in found])


def test_after_a_nan_the_losses_of_the_epoch_are_not_known(tmp_path):
    rows = ROWS.copy()
    rows[9] = np.nan
    model, path = compiled_model(), tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(rows, rows[:, :2], callbacks=[KerasCallback(recorder)], **settings)
    losses = [record.loss for record in read_run(path).records()]
    assert [None] * 3 == losses[2:5]
    assert np.isnan(losses[1])
    assert np.isfinite(losses[5])  # the next epoch


def test_a_resumed_run_goes_on_after_its_past(tmp_path):
    path = tmp_path / "run.jsonl"
    for _ in range(2):  # as two processes
        with Recorder(path) as recorder:
            fit(LossScaleOptimizer(keras.optimizers.SGD(0.01)), KerasCallback(recorder))
    steps = [record.step for record in read_run(path).records()]
    assert list(range(1, 11)) == steps


def test_what_keras_knows_of_the_run_is_recorded(tmp_path):
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(0.01), policy=Dynamic(init_scale=1024.0, growth_interval=3)
    )
    with Recorder(tmp_path / "run.jsonl") as recorder:
        fit(optimizer, KerasCallback(recorder))
    run = read_run(tmp_path / "run.jsonl")
    paths = [v.path for v in optimizer.inner_optimizer._trainable_variables]
    assert paths == run.header["names"]
    assert ["float32", "float32"] == run.header["dtypes"]
    assert 3 == run.header["policy"]["growth_interval"]
    (skipped,) = (record for record in run.records() if record.skipped)
    assert ((paths[0], "inf"),) == skipped.nonfinite
    assert paths[1] == skipped.nearest_finite


def test_some_batches_are_recorded(tmp_path):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01))
    with Recorder(tmp_path / "run.jsonl") as recorder:
        fit(optimizer, KerasCallback(recorder, every=2))
    steps = [record.step for record in read_run(tmp_path / "run.jsonl").records()]
    assert [2, 4] == steps


def test_another_optimizer_is_one_error():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    with pytest.raises(SettingTypeError, match="LossScaleOptimizer"):
        model.fit(ROWS, ROWS[:, :2], callbacks=[KerasCallback()], verbose=0)
