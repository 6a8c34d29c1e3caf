"""The example, run as a reader runs it."""

import pytest
from helpers.examples import check_the_story, run_example

pytest.importorskip("optax", reason="optax is not installed")
pytest.importorskip("flax", reason="flax is not installed")


def test_float16_learns_with_a_dynamic_scale_only():
    runs, others = run_example("train_optax")
    check_the_story(runs)
    assert ["step 200: skipped"] == others
