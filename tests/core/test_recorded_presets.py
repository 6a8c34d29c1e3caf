"""Presets against recordings of the originals, at least 1,000 sequences each.

The recordings were made by tools/record_originals.py, which runs the originals.
"""

import random

import pytest
from helpers.sequences import draw, overflow_pattern
from helpers.traces import check_equal_while, read, replay

from lossscale import presets
from lossscale.core.checks import FLOAT32_MAX, SMALLEST_NORMAL


def deepspeed(config):
    return presets.get(
        "deepspeed_consecutive" if config["consecutive_hysteresis"] else "deepspeed",
        init_scale=config["init_scale"],
        growth_interval=config["scale_window"],
        min_scale=config["min_scale"],
        hysteresis=config["delayed_shift"],
    )


def megatron(config):
    return presets.get(
        "megatron",
        init_scale=config["initial_scale"],
        min_scale=config["min_scale"],
        growth_factor=config["growth_factor"],
        backoff_factor=config["backoff_factor"],
        growth_interval=config["growth_interval"],
        hysteresis=config["hysteresis"],
    )


def paddle(config):
    given = {
        "init_scale": config.get("init_loss_scaling"),
        "growth_factor": config.get("incr_ratio"),
        "backoff_factor": config.get("decr_ratio"),
        "growth_interval": config.get("incr_every_n_steps"),
        "hysteresis": config.get("decr_every_n_nan_or_inf"),
    }
    return presets.get("paddle", **{k: v for k, v in given.items() if v is not None})


def mindspore(config):
    factor = float(config["scale_factor"])
    return presets.get(
        "mindspore",
        init_scale=config["scale_value"],
        growth_factor=factor,
        backoff_divisor=factor,
        growth_interval=config["scale_window"],
    )


def counters_of(name, row, policy):
    """Return our two counters as the original's attributes tell them, per step."""
    counters = row["counters"]
    if name.startswith("deepspeed"):
        used = [policy.hysteresis - left for left in counters["cur_hysteresis"]]
        # The original stops counting once the next overflow would back off.
        return None, used
    if name == "megatron":
        left = counters["_hysteresis_tracker"]
        used = [policy.hysteresis - value for value in left]
        return counters["_growth_tracker"], used
    if name == "paddle":
        return counters["_incr_count"], counters["_decr_count"]
    return counters["counter"], None


@pytest.mark.parametrize(
    ("name", "translate"),
    [
        ("deepspeed", deepspeed),
        ("deepspeed_consecutive", deepspeed),
        ("megatron", megatron),
        ("paddle", paddle),
        ("mindspore", mindspore),
    ],
)
def test_a_preset_takes_the_steps_of_the_recorded_original(name, translate):
    recorded = read(f"recorded/{name}")
    assert len(recorded) >= 1000
    for row in recorded:
        policy = translate(row["config"])
        states = replay(policy, [flag == "1" for flag in row["finite"]])
        scales = [state.scale for state in states]
        # Paddle has no floor, and DeepSpeed, in float64, no cap: compare until they
        # leave the normal float32 numbers.
        compared = check_equal_while(
            row["scale"],
            scales,
            lambda scale: SMALLEST_NORMAL <= scale <= FLOAT32_MAX,
            row["config"],
        )
        good, bad = counters_of(name, row, policy)
        if good is not None:
            assert good[:compared] == [state.good for state in states][:compared]
        if bad is not None:
            top = policy.hysteresis - 1 if name.startswith("deepspeed") else 2**31
            ours = [min(state.bad, top) for state in states]
            assert bad[:compared] == ours[:compared]


def test_the_preset_mindspore_takes_the_managers_steps_for_powers_of_two():
    compared = 0
    for row in read("recorded/mindspore_manager"):
        config = {"scale_factor": 2, "init_loss_scale": 2**24, "scale_window": 2000}
        config |= row["config"]
        if config["scale_factor"] not in (2, 4):
            continue  # the manager multiplies by a float64 reciprocal
        config["scale_value"] = config["init_loss_scale"]
        states = replay(mindspore(config), [flag == "1" for flag in row["finite"]])
        scales = [state.scale for state in states]
        compared += bool(
            check_equal_while(row["scale"], scales, lambda s: s < 2.0**127, config)
        )
    assert compared > 400


class ApexLossScaler:
    """The rule of apex.amp's LossScaler, told from field notes with plain branches.

    apex has no distribution that could be installed beside ours, and no trace of it
    was recorded.
    """

    def __init__(self, first, window):
        self.scale, self.window, self.unskipped = min(first, 2.0**24), window, 0

    def update(self, finite):
        if not finite:
            self.scale /= 2
            self.unskipped = 0
            return
        self.unskipped += 1
        if self.unskipped == self.window:
            self.scale = min(2.0**24, self.scale * 2)
            self.unskipped = 0


def test_the_preset_apex_takes_the_steps_told_by_its_description():
    rng = random.Random(7)
    for _ in range(1000):
        config = draw(
            rng,
            init_scale=(1.0, 3.0, 1024.0, 2.0**16, 2.0**23, 3.0 * 2**21),
            growth_interval=(1, 2, 3, 5, 10),
        )
        flags = overflow_pattern(rng, rng.randint(20, 100))
        original = ApexLossScaler(config["init_scale"], config["growth_interval"])
        expected = []
        for flag in flags:
            original.update(flag)
            expected.append((original.scale, original.unskipped))
        states = replay(presets.get("apex", **config), flags)
        actual = [(state.scale, state.good) for state in states]
        check_equal_while(
            expected, actual, lambda pair: pair[0] >= SMALLEST_NORMAL, config
        )
