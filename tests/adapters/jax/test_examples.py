"""The examples, run as a reader runs them."""

import re

import pytest
from helpers.examples import check_the_story, run_example

jax = pytest.importorskip("jax", reason="jax is not installed")

ZEROS = 10.8
"""The percentage of zeros in the test set: a network that always predicts 0."""


def test_float16_learns_with_a_dynamic_scale_only():
    runs, others = run_example("train_jax")
    check_the_story(runs)
    assert ["step 200: nan in 8 layers, skipped"] == others


def test_eight_devices_skip_together_and_learn():
    pytest.importorskip("optax", reason="optax is not installed")
    pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    if jax.__version_info__ < (0, 7):
        pytest.skip("orbax does not save replicated arrays with a JAX this old")
    runs, others = run_example("train_jax_sharded")
    assert ["float16, no scaling", "float16, dynamic scale"] == list(runs)
    accuracy, skipped, scale = runs["float16, dynamic scale"]
    assert accuracy > 90
    assert 1 < skipped < 30
    assert scale > 1
    # The overflow in step 200, on one device, is skipped at a scale of 1 as well.
    assert (ZEROS, 1, 1) == runs["float16, no scaling"]
    assert [] == others


def test_the_smaller_of_two_losses_is_learned_with_a_scale_of_its_own():
    pytest.importorskip("optax", reason="optax is not installed")
    _, lines = run_example("two_losses")
    pattern = r"(.+?) +digits ([\d.]+)% tilt error ([\d.]+) lost (\d+)% scales (.+)"
    one, each = (re.fullmatch(pattern, line).groups() for line in lines)
    assert ["one scale", "a scale for each"] == [one[0], each[0]]
    assert abs(float(one[1]) - float(each[1])) < 2
    assert min(float(one[1]), float(each[1])) > 95
    # A constant has an error of 1.
    assert float(one[2]) > 0.8
    assert float(each[2]) < 0.1
    assert int(one[3]) > 90
    assert int(each[3]) < 40
    first, second = (int(scale.removeprefix("2^")) for scale in each[4].split(", "))
    assert f"2^{first}" == one[4]
    assert second - first > 30
