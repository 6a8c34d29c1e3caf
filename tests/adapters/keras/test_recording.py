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
