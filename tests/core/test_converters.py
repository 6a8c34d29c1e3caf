"""Other libraries' states: what needs none of them installed; see tests/compat."""

import random

import pytest
from helpers import recordings
from helpers.sequences import overflow_pattern
from helpers.traces import read, replay

from lossscale import Dynamic, Fixed, ScaleState, presets
from lossscale.convert import LIBRARIES, detect_library, from_library, to_library
from lossscale.errors import StateError


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_librarys_own_preset_loses_nothing(library):
    policy = presets.get(LIBRARIES[library].preset)
    written = to_library(library, policy, ScaleState(4.0, 3, 0))
    assert () == written.dropped
    assert (policy, ScaleState(4.0, 3, 0)) == from_library(library, written.values)


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_was_written_is_recognised(library):
    policy = presets.get(LIBRARIES[library].preset)
    values = to_library(library, policy, policy.init()).values
    assert library == detect_library(values)


@pytest.mark.parametrize("library", LIBRARIES)
def test_training_goes_on_as_if_nothing_had_happened(library):
    """Convert in the middle of a sequence; the rest must be that of no conversion."""
    rng = random.Random(11)
    for _ in range(50):
        policy = presets.get(LIBRARIES[library].preset, init_scale=1024.0)
        keeps_interval = library not in {"megatron", "apex"}
        if keeps_interval:
            interval = rng.randint(1, 6)
            policy = presets.get(
                LIBRARIES[library].preset, init_scale=1024.0, growth_interval=interval
            )
        flags = overflow_pattern(rng, 40)
        states = replay(policy, flags)
        middle = states[19]
        values = to_library(library, policy, middle).values
        read_policy, state = from_library(library, values)
        rest = replay(read_policy, flags[20:], state)
        expected = [s.scale for s in states[20:]]
        assert expected == [s.scale for s in rest]


@pytest.mark.slow
def test_recorded_deepspeed_states_are_read_as_the_state_they_are():
    """Read the attributes recorded in the middle, and go on as the original did."""
    for row in read("recorded/deepspeed")[:300]:
        config, middle = row["config"], len(row["scale"]) // 2
        values = {
            "cur_scale": row["scale"][middle],
            "cur_iter": middle + 1,
            "last_overflow_iter": row["counters"]["last_overflow_iter"][middle],
            "scale_factor": 2.0,
            "scale_window": config["scale_window"],
            "min_scale": config["min_scale"],
            "delayed_shift": config["delayed_shift"],
            "cur_hysteresis": row["counters"]["cur_hysteresis"][middle],
            "consecutive_hysteresis": config["consecutive_hysteresis"],
        }
        policy, state = from_library("deepspeed", values)
        flags = [flag == "1" for flag in row["finite"][middle + 1 :]]
        scales = [s.scale for s in replay(policy, flags, state)]
        assert row["scale"][middle + 1 :] == scales


def test_recorded_megatron_states_are_read_as_the_state_they_are():
    for row in read("recorded/megatron")[:300]:
        config, middle = row["config"], len(row["scale"]) // 2
        values = {
            "scale": row["scale"][middle],
            "growth_tracker": row["counters"]["_growth_tracker"][middle],
            "hysteresis_tracker": row["counters"]["_hysteresis_tracker"][middle],
        }
        policy, state = from_library("megatron", values, recordings.megatron(config))
        flags = [flag == "1" for flag in row["finite"][middle + 1 :]]
        scales = [s.scale for s in replay(policy, flags, state)]
        assert row["scale"][middle + 1 :] == scales


def test_what_another_library_cannot_keep_is_said():
    policy = Dynamic(hysteresis=3, min_scale=0.5, init_scale=8.0)
    written = to_library("torch", policy, ScaleState(8.0, 2, 1))
    text = "\n".join(written.dropped)
    assert "hysteresis is 3 here, torch will take 1" in text
    assert "min_scale is 0.5 here" in text
    assert "bad_steps is 1 here, torch will take 0" in text


def test_a_policy_that_no_library_has_is_an_error_that_says_what_to_pass():
    policy = Fixed(8.0)
    words = r"to flax, got Fixed\(scale=8\.0\)\. Pass a Dynamic\."
    with pytest.raises(StateError, match=words):
        to_library("flax", policy, policy.init())


def test_what_megatron_does_not_save_is_to_be_set_there():
    policy = presets.get("megatron", hysteresis=4)
    written = to_library("megatron", policy, ScaleState(8.0, 2, 1))
    assert 3 == written.values["hysteresis_tracker"]
    expected = "hysteresis is 4 here, megatron does not save it: set it there"
    assert (expected,) == written.dropped
    assert (
        ()
        == to_library(
            "megatron", presets.get("megatron"), ScaleState(8.0, 2, 5)
        ).dropped
    )


def test_a_count_at_the_interval_is_written_so_that_it_still_fires():
    policy = presets.get("flax", growth_interval=5)
    written = to_library("torch", policy, ScaleState(8.0, 5, 0))
    assert 4 == written.values["_growth_tracker"]
    assert any(line.startswith("good_steps is 5 here") for line in written.dropped)
    policy = presets.get("torch", growth_interval=100)
    written = to_library("flax", policy, ScaleState(8.0, 150, 0))
    assert 100 == written.values["fin_steps"]
    assert any(line.startswith("good_steps is 150 here") for line in written.dropped)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_preset_can_be_written_for_every_library(library):
    small = Dynamic(init_scale=0.5, max_scale=0.5)
    for policy in (small, *(preset.policy for preset in presets.PRESETS.values())):
        written = to_library(library, policy, policy.init())
        assert policy.init_scale == from_library(library, written.values)[1].scale


def test_a_fixed_scale_cannot_be_written():
    with pytest.raises(StateError, match="dynamic scale"):
        to_library("torch", Fixed(8.0), Fixed(8.0).init())


def test_a_division_by_three_is_said_to_be_lost_and_one_by_two_is_not():
    thirds = Dynamic(growth_factor=3.0, backoff_divisor=3.0)
    assert "backoff" in " ".join(to_library("torch", thirds, thirds.init()).dropped)
    halves = Dynamic(backoff_divisor=2.0, max_scale=presets.FLOAT32_MAX)
    assert () == to_library("torch", halves, halves.init()).dropped


TORCH = {
    "scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 10,
    "_growth_tracker": 3,
}


@pytest.mark.parametrize(
    ("library", "values", "message"),
    [
        ("torch", {}, "'_growth_tracker'.* are missing"),
        ("torch", TORCH | {"scale": 0.0}, "not usable: The scale must be"),
        ("torch", TORCH | {"scale": float("inf")}, "not usable"),
        ("torch", TORCH | {"scale": None}, "'scale' must be a number"),
        ("torch", TORCH | {"growth_interval": 2.5}, "must be a whole number"),
        ("torch", TORCH | {"_growth_tracker": -1}, "0 or more"),
        ("torch", [1], "is a mapping"),
        ("apex", {"loss_scaler0": 3}, "must be a mapping"),
        ("apex", {"loss_scaler0": {}, "loss_scaler1": {}}, "several losses"),
        ("horovod", {}, "No converter for 'horovod'"),
        ("torch", TORCH | {"scale": 10**400}, "not usable"),
        ("torch", TORCH | {"scale": 10**5000}, "not usable"),
        (
            "megatron",
            {"scale": 8.0, "growth_tracker": 0, "hysteresis_tracker": 4},
            r"presets\.get\('megatron', hysteresis=4\)",
        ),
        (
            "deepspeed",
            {"cur_scale": 8.0, "cur_iter": 1, "last_overflow_iter": -1}
            | {"consecutive_hysteresis": "False"},
            "must be True or False",
        ),
        ([], {}, "No converter"),
    ],
)
def test_a_foreign_or_broken_state_gives_one_clear_error(library, values, message):
    with pytest.raises(StateError, match=message):
        from_library(library, values)


def test_the_keys_of_apex_are_those_it_saves():
    policy, state = from_library(
        "apex", {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 17}}
    )
    assert (presets.get("apex"), ScaleState(65536.0, 17, 0)) == (policy, state)


def test_floors_are_read():
    saved = {"loss_scale": 8.0, "counter": 0, "min_loss_scale": 0.25}
    assert 0.25 == from_library("jmp", saved)[0].min_scale
    saved = {"scale": 8.0, "fin_steps": 0, "minimum_scale": 0.25}
    assert 0.25 == from_library("flax", saved)[0].min_scale


def test_deepspeeds_hysteresis_never_goes_below_one():
    values = to_library(
        "deepspeed", presets.get("deepspeed"), ScaleState(4.0, 0, 2)
    ).values
    assert 1 == values["cur_hysteresis"]


def test_what_comes_to_the_same_thing_is_not_lost():
    policy = Dynamic(consecutive_overflows=True, max_scale=presets.FLOAT32_MAX)
    assert () == to_library("torch", policy, policy.init()).dropped


def test_a_newer_state_of_ours_is_named_as_such():
    assert "lossscale" == detect_library({"format": "lossscale/2"})
    with pytest.raises(StateError, match="a mapping"):
        detect_library([1])


def test_settings_can_only_come_from_a_dynamic_policy():
    with pytest.raises(StateError, match="must be a Dynamic"):
        from_library("torch", TORCH, Fixed(8.0))


def test_a_whole_number_may_be_written_as_a_float():
    _, state = from_library("torch", TORCH | {"_growth_tracker": 3.0})
    assert ScaleState(8.0, 3, 0) == state


def test_a_state_of_an_unknown_library_is_not_guessed():
    with pytest.raises(StateError, match="do not identify a library"):
        detect_library({"loss": 3})


def test_the_state_of_a_collapsed_torch_scaler_below_the_normals_is_refused():
    with pytest.raises(StateError, match="not usable"):
        from_library("torch", TORCH | {"scale": 2.0**-130})
