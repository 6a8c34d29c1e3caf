"""Presets against recordings of the originals, at least 1,000 sequences each.

The recordings were made by tools/record_originals.py and record_tensorflow_contrib.py,
which run the originals.
"""

import pytest
from helpers import recordings
from helpers.traces import check_equal_while, read, replay, replay_together

from lossscale import presets

TRANSLATE = {
    "apex": recordings.apex,
    "deepspeed": recordings.deepspeed,
    "deepspeed_consecutive": recordings.deepspeed,
    "megatron": recordings.megatron,
    "mindspore": recordings.mindspore,
    "paddle": recordings.paddle,
    "tensorflow_contrib": recordings.tensorflow_contrib,
}


def counters_of(name, row, policy):
    """Return our two counters as the original's attributes tell them, per step."""
    counters = row["counters"]
    if name.startswith("deepspeed"):
        return None, [policy.hysteresis - n for n in counters["cur_hysteresis"]]
    if name == "megatron":
        used = [policy.hysteresis - n for n in counters["_hysteresis_tracker"]]
        return counters["_growth_tracker"], used
    if name == "paddle":
        return counters["_incr_count"], counters["_decr_count"]
    if name == "tensorflow_contrib":
        return counters["good"], counters["bad"]
    return counters["_unskipped" if name == "apex" else "counter"], None


@pytest.mark.parametrize("name", TRANSLATE)
def test_a_preset_takes_the_steps_of_the_first_rows(name):
    rows = read(f"recorded/{name}")[:20]
    policies = [TRANSLATE[name](row["config"]) for row in rows]
    alone = [replay(*pair) for pair in zip(policies, map(flags_of, rows), strict=True)]
    check_rows(name, rows, policies, alone)
    # All rows below are replayed side by side.
    pairs = list(zip(policies, map(flags_of, rows), strict=True))
    assert alone == replay_together(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSLATE)
def test_a_preset_takes_the_steps_of_the_recorded_original(name):
    recorded = read(f"recorded/{name}")
    assert len(recorded) >= 1000
    policies = [TRANSLATE[name](row["config"]) for row in recorded]
    pairs = list(zip(policies, map(flags_of, recorded), strict=True))
    check_rows(name, recorded, policies, replay_together(pairs))


def flags_of(row):
    return [flag == "1" for flag in row["finite"]]


def check_rows(name, rows, policies, replayed):
    """Raise unless the preset's scales and counters are the recorded ones."""
    for row, policy, states in zip(rows, policies, replayed, strict=True):
        # Paddle and apex have no floor, and DeepSpeed, in float64, no cap: compare
        # until they leave the normal float32 numbers.
        compared = check_equal_while(
            row["scale"],
            [state.scale for state in states],
            recordings.is_normal,
            row["config"],
        )
        good, bad = counters_of(name, row, policy)
        if good is not None:
            assert good[:compared] == [state.good_steps for state in states][:compared]
        if bad is not None:
            # DeepSpeed stops counting once the next overflow backs off.
            top = policy.hysteresis - 1 if name.startswith("deepspeed") else 2**31
            ours = [min(state.bad_steps, top) for state in states]
            assert bad[:compared] == ours[:compared]


@pytest.mark.parametrize(
    "name", ["deepspeed", "deepspeed_consecutive", "megatron", "mindspore", "paddle"]
)
def test_the_defaults_are_those_that_the_library_itself_passes(name):
    """The last twenty rows were recorded with the library's own values."""
    for row in read(f"recorded/{name}")[-20:]:
        assert presets.get(name) == TRANSLATE[name](row["config"])


def test_the_defaults_of_apex_are_those_it_was_recorded_with():
    (config,) = {str(row["config"]) for row in read("recorded/apex")[-20:]}
    assert "{}" == config  # nothing was changed after construction
    assert presets.get("apex") == recordings.apex({})
    assert 2.0**16 == presets.get("apex").init_scale


@pytest.mark.slow
def test_the_preset_mindspore_takes_the_managers_steps_for_powers_of_two():
    compared, configs, rows = 0, [], []
    for row in read("recorded/mindspore_manager"):
        config = {"scale_factor": 2, "init_loss_scale": 2**24, "scale_window": 2000}
        config |= row["config"]
        if config["scale_factor"] not in (2, 4):
            continue  # the manager multiplies by a float64 reciprocal
        config["scale_value"] = config["init_loss_scale"]
        configs.append(config)
        rows.append(row)
    pairs = [
        (recordings.mindspore(config), flags_of(row))
        for config, row in zip(configs, rows, strict=True)
    ]
    replayed = replay_together(pairs)
    for config, row, states in zip(configs, rows, replayed, strict=True):
        scales = [state.scale for state in states]
        compared += bool(
            check_equal_while(row["scale"], scales, lambda s: s < 2.0**127, config)
        )
    assert compared > 400
