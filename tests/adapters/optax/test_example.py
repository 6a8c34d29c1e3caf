"""The example, run as a reader runs it."""

import pytest
from helpers.examples import run_example

pytest.importorskip("optax", reason="optax is not installed")
pytest.importorskip("flax", reason="flax is not installed")


def test_a_dynamic_scale_saves_what_float16_alone_loses():
    runs, others = run_example("optax")
    assert ["float32", "float16, no scaling", "float16, dynamic scale"] == list(runs)
    accuracy, skipped, scale = runs["float16, dynamic scale"]
    assert accuracy > 90
    assert 0 < skipped < 30
    assert scale > 1
    assert runs["float32"][0] > 90
    assert (0, 1) == runs["float32"][1:]
    # The share of zeros in the test set: a network that always says "0".
    assert (10.8, 0, 1) == runs["float16, no scaling"]
    assert ["step 200: skipped 1 in a row"] == others
