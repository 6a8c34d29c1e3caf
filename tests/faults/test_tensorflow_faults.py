"""The faults of `tools/run_faults.py tensorflow`, shortened."""

import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

from faults import tensorflow_driver

SOME = (
    "v1 Momentum",
    "v1 Adam, manager",
    "v1 Adagrad",
    "v1 Ftrl",
    "tf_keras SGD",
    "tf_keras Adam amsgrad, clipnorm",
    "legacy Nadam",
)
"""One of each kind of state; the script runs them all."""


@pytest.mark.parametrize("configuration", SOME)
def test_weights_and_state_stay_finite_whatever_goes_wrong(configuration):
    outcome = tensorflow_driver.run(configuration, own=False, steps=400, seed=1)
    assert ("", 400) == (outcome.broken, outcome.steps)
    assert outcome.applied > 100
    assert outcome.skipped > 10


@pytest.mark.parametrize(
    "configuration", ["v1 Adam", "tf_keras Adagrad", "legacy Ftrl"]
)
def test_the_same_faults_break_the_frameworks_own(configuration):
    outcome = tensorflow_driver.run(configuration, own=True, steps=400, seed=0)
    assert "after step" in outcome.broken
