"""The example for Lightning, run as a reader runs it."""

import pytest
from helpers.examples import check_the_story, run_example

pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("numpy", reason="numpy is not installed")


def test_a_dynamic_scale_saves_what_float16_alone_loses(tmp_path):
    runs, others = run_example("train_lightning", tmp_path)
    check_the_story(runs)
    assert ["step 200 skipped: loss, 8 layers"] == others
    assert not [*tmp_path.iterdir()]  # Lightning leaves no folder behind
