"""The faults of `tools/run_faults.py keras`, shortened, on one backend."""

import pytest
from helpers.keras_backend import QUIET

from faults import keras_driver

pytestmark = [
    QUIET,
    # What the plan leaves out, on purpose.
    pytest.mark.filterwarnings("ignore:Gradients do not exist"),
]

SOME = (
    "SGD momentum",
    "Adam global_clipnorm",
    "Adam accumulation",
    "Adagrad",
    "Ftrl",
    "Lamb",
)
"""One of each kind of state; the script runs them all."""


@pytest.mark.parametrize("configuration", SOME)
def test_weights_and_state_stay_finite_whatever_goes_wrong(configuration):
    outcome = keras_driver.run(configuration, own=False, steps=400, seed=1)
    assert ("", 400) == (outcome.broken, outcome.steps)
    assert outcome.applied > 100
    assert outcome.skipped > 10


@pytest.mark.parametrize("configuration", ["Adam", "Adagrad", "Adam global_clipnorm"])
def test_the_same_faults_break_keras_own(configuration):
    outcome = keras_driver.run(configuration, own=True, steps=400, seed=0)
    assert "after step" in outcome.broken
