"""The example with Accelerate, run as a reader runs it."""

import pytest
from helpers.examples import check_the_story, run_example

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")


def test_a_dynamic_scale_saves_what_float16_alone_loses():
    runs, others = run_example("train_accelerate")
    check_the_story(runs)
    _, skipped, _, rate = runs["float16, dynamic scale"]
    # The rate falls from 0.02 to 0 in 300 steps; the skipped ones are still to come.
    assert round(0.02 * skipped / 300, 5) == rate
    assert 0.0 == runs["float32"][3] == runs["float16, no scaling"][3]
    assert ["step 200 skipped: loss, 8 layers"] == others
