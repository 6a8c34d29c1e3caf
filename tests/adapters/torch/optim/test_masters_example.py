"""The example, run as a reader runs it."""

import pytest
from helpers.examples import run_example

pytest.importorskip("torch", reason="torch is not installed")


def test_float16_weights_with_masters_learn_what_float32_learns():
    runs, others = run_example("train_torch_masters")
    assert ["float32", "float16, masters"] == list(runs)
    assert all(accuracy > 90 for accuracy, *_ in runs.values())
    assert (0, 1) == runs["float32"][1:]
    assert 1 <= runs["float16, masters"][1] < 10
    assert ["step 200 skipped: loss"] == others
