"""The example, run as a reader runs it."""

import pytest
from helpers.examples import check_the_story, run_example

pytest.importorskip("torch", reason="torch is not installed")


def test_a_dynamic_scale_saves_what_float16_alone_loses():
    runs, others = run_example("train_torch")
    check_the_story(runs)
    assert ["step 200 skipped: loss, 8 layers"] == others
