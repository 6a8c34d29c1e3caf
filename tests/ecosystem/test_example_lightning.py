"""The example for Lightning, run as a reader runs it."""

import pytest
from helpers.examples import run_example

pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("numpy", reason="numpy is not installed")


def test_a_dynamic_scale_saves_what_float16_alone_loses(tmp_path):
    runs, others = run_example("lightning", tmp_path)
    assert ["float32", "float16, no scaling", "float16, dynamic scale"] == list(runs)
    accuracy, skipped, scale = runs["float16, dynamic scale"]
    assert accuracy > 90
    assert 0 < skipped < 30
    assert scale > 1
    assert runs["float32"][0] > 90
    assert (0, 1) == runs["float32"][1:]
    # The share of zeros in the test set: a network that always says "0".
    assert (10.8, 0, 1) == runs["float16, no scaling"]
    assert ["step 200: nan in 8 layers, skipped"] == others
    assert not [*tmp_path.iterdir()]  # Lightning leaves no folder behind
