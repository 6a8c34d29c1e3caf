"""The recorded originals of TensorFlow's classic classes, replayed bit for bit."""

import numpy as np
import pytest
from helpers.recordings import tensorflow_contrib
from helpers.traces import check_equal_while, read, replay

import lossscale.numpy as ls

EXPONENTIAL = (
    "tensorflow/contrib_exponential.tf1.15.5.eager",
    "tensorflow/unit_exponential.tf1.15.5.eager",
)
DYNAMIC = (
    "tensorflow/dynamic.tf1.15.5.eager",
    "tensorflow/dynamic.tf2.3.4.eager",
    "tensorflow/unit_dynamic.tf1.15.5.eager",
    "tensorflow/unit_dynamic.tf2.3.4.function",
)


def usable_scale(value):
    """Ours refuses a scale that is zero, negative, NaN or beyond float32."""
    return 0 < float(value) <= float(np.finfo(np.float32).max)


def usable_exponential(config):
    """Settings that the reference page rules out, and ours refuses."""
    return (
        usable_scale(config["init_loss_scale"])
        and config["incr_ratio"] > 1
        and config["decr_ratio"] < 1
    )


def usable_dynamic(config):
    return usable_scale(config["initial_loss_scale"]) and config["multiplier"] > 1


def rows(files, usable):
    return [row for file in files for row in read(file) if usable(row["config"])]


def test_the_settings_that_are_left_out_are_few_and_each_is_refused():
    left_out = [
        row for row in read(EXPONENTIAL[0]) if not usable_exponential(row["config"])
    ]
    assert 0 < len(left_out) < 12
    for row in left_out:
        config = {key: float(value) for key, value in row["config"].items()}
        config["incr_every_n_steps"] = int(config["incr_every_n_steps"])
        config["decr_every_n_nan_or_inf"] = int(config["decr_every_n_nan_or_inf"])
        with pytest.raises(ValueError, match="must be"):
            ls.ExponentialUpdateLossScaleManager(**config)
    left_out = [row for row in read(DYNAMIC[0]) if not usable_dynamic(row["config"])]
    assert 0 < len(left_out) < 16
    for row in left_out:
        config = {key: float(value) for key, value in row["config"].items()}
        with pytest.raises(ValueError, match="must be"):
            ls.DynamicLossScale(**config)


def cases(files, usable):
    """Return every trace as a case; of the random ones all but a few are slow."""
    quick = ("random_00", "random_10")
    return [
        pytest.param(
            row,
            id=row["name"],
            marks=[pytest.mark.slow]
            if row["name"].startswith("random_") and not row["name"].startswith(quick)
            else [],
        )
        for row in rows(files, usable)
    ]


@pytest.mark.parametrize("row", cases(EXPONENTIAL, usable_exponential))
def test_the_exponential_manager_replays_the_original(row):
    manager = ls.ExponentialUpdateLossScaleManager(**row["config"], at_floor="clamp")
    expected = list(zip(row["scale"], row["good"], row["bad"], strict=True))
    actual = []
    for finite in row["finite"]:
        assert manager.update_loss_scale(finite) is None
        state = manager._state_variables.read()
        actual.append(tuple(value.item() for value in state))
    assert expected == actual
    assert manager.get_loss_scale() == row["scale"][-1]


@pytest.mark.parametrize("row", cases(DYNAMIC, usable_dynamic))
def test_the_dynamic_loss_scale_replays_the_original(row):
    loss_scale = ls.DynamicLossScale(**row["config"])
    expected = list(zip(row["scale"], row["good"], row["should_apply"], strict=True))
    actual = []
    for finite in row["finite"]:
        gradient = np.float32(1.0 if finite else np.nan)
        operation, should_apply = loss_scale.update([gradient, None])
        assert operation is None
        good = loss_scale._state_variables.read().good_steps.item()
        actual.append((loss_scale().item(), good, bool(should_apply)))
    assert expected == actual


@pytest.mark.parametrize(
    ("file", "make"),
    [
        ("contrib_fixed.tf1.15.5.eager", ls.FixedLossScaleManager),
        ("fixed.tf1.15.5.eager", ls.FixedLossScale),
        ("fixed.tf2.3.4.eager", ls.FixedLossScale),
    ],
)
def test_a_fixed_scale_replays_the_original(file, make):
    for row in read(f"tensorflow/{file}"):
        fixed = make(row["config"]["value"])
        for finite, scale in zip(row["finite"], row["scale"], strict=True):
            if make is ls.FixedLossScaleManager:
                assert fixed.update_loss_scale(finite) is None
                assert scale == fixed.get_loss_scale()
            else:
                gradient = np.float32(1.0 if finite else np.inf)
                assert fixed.update([gradient]) == (None, True)
                assert scale == fixed()


@pytest.mark.slow
def test_the_preset_tensorflow_contrib_takes_the_steps_of_the_traces():
    sequences = 0
    for row in rows(EXPONENTIAL, usable_exponential):
        config = row["config"]
        if config["init_loss_scale"] < 1 or not config["incr_every_n_steps"]:
            continue  # a policy starts within its bounds; the classes need not
        states = replay(tensorflow_contrib(config), row["finite"])
        expected = list(zip(row["scale"], row["good"], row["bad"], strict=True))
        check_equal_while(expected, [tuple(s) for s in states], lambda _: True, config)
        sequences += 1
    assert sequences > 250


def test_hold_does_not_apply_an_update_that_would_end_below_the_floor():
    manager = ls.ExponentialUpdateLossScaleManager(1.2, 2, 1)
    manager.update_loss_scale(False)
    assert np.float32(1.2) == manager.get_loss_scale()
    clamped = ls.ExponentialUpdateLossScaleManager(1.2, 2, 1, at_floor="clamp")
    clamped.update_loss_scale(False)
    assert np.float32(1.0) == clamped.get_loss_scale()


@pytest.mark.slow
def test_hold_and_clamp_differ_only_where_the_floor_is_touched():
    for row in rows(EXPONENTIAL, usable_exponential):
        if row["config"]["init_loss_scale"] < 1:
            continue
        held = ls.ExponentialUpdateLossScaleManager(**row["config"])
        for finite, scale in zip(row["finite"], row["scale"], strict=True):
            held.update_loss_scale(finite)
            if scale <= 1:
                break
            assert scale == held.get_loss_scale()
