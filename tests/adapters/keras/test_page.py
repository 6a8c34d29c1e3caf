"""The blocks of the page that belong to one backend, and the example.

Blocks marked `python` run with the other pages, in a process with one backend.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.keras_backend import BACKEND, QUIET, keras, numpy
from helpers.limits import HANG_SECONDS

from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "adapters" / "keras.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```py\n# ([\w ]+)\n(.*?)```", PAGE, re.DOTALL))


def test_the_page_has_a_loop_for_each_backend():
    assert {"torch", "jax", "every backend"} == set(BLOCKS)
    assert "import tensorflow as tf" in PAGE


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_the_block_of_this_backend_trains_or_restores(name, tmp_path, monkeypatch):
    if name not in {BACKEND, "every backend"}:
        pytest.skip(f"needs the {name} backend, this is {BACKEND}")
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    rows = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    targets = rows.sum(axis=1, keepdims=True)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), 2.0**15, 2), "mse")
    model.fit(rows, targets, verbose=0)
    names = {
        "keras": keras,
        "LossScaleOptimizer": LossScaleOptimizer,
        "model": model,
        "rows": rows,
        "targets": targets,
    }
    exec(compile(BLOCKS[name], f"keras.md: {name}", "exec"), names)  # noqa: S102
    if name == "every backend":
        loaded = names["again"].optimizer
        assert LossScaleOptimizer is type(loaded)
        for expected, found in zip(
            model.optimizer.variables, loaded.variables, strict=True
        ):
            np.testing.assert_array_equal(numpy(expected), numpy(found))
    else:
        losses = names["losses"]
        assert 20 == len(losses)
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0]


def test_the_example_learns_in_float16_with_a_scale_alone():
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_keras.py")],
        # torch's threads wait for each other in a loop: slow while other tests run.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert 0 == finished.returncode, finished.stderr[-4000:]
    lines = [line for line in finished.stdout.splitlines() if "accuracy" in line]
    shown = [re.search(r"accuracy ([\d.]+)%", line)[1] for line in lines]
    assert 3 == len(shown)
    assert float(shown[0]) > 90
    # The share of zeros in the test set: a network that always says "0".
    assert "10.8" == shown[1]
    assert float(shown[2]) > 90
    assert re.search(r"skipped [1-9]\d? scale [\d,]+", lines[2])
