"""The scale and its tracker, step by step as torch's, on random sequences."""

import math
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import BAD, init_scale_tensor, parameter  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic, Fixed, Signal, presets  # noqa: E402

NORMAL = float(np.finfo(np.float32).tiny)
GROWTH = (2.0, 2.0, 4.0, 1.5, 1.7, 1.001, 3.0, 10.0)
BACKOFF = (0.5, 0.5, 0.25, 0.8, 0.9, 0.1, 1 / 3, 0.999)
STARTS = (2.0**16, 1.0, 2.0**120, 2.0**-120, 3.7)
INTERVALS = (1, 1, 2, 3, 5, 17, 2000, 0, -3, 2**31 - 1, 2**31, 2**40)


def sequence(random_):
    """Return what the gradients of each step hold: 1, or something bad."""
    share = random_.choice((0.0, 0.1, 0.5, 0.9))
    return [
        random_.choice(BAD) if random_.random() < share else 1.0
        for _ in range(random_.randint(1, 20))
    ]


def walk(scaler, gradients, weight, optimizer):
    """Take steps through the whole class; yield scale and tracker after each."""
    for gradient in gradients:
        optimizer.zero_grad()
        loss = (weight * 1e-30).sum() * (1.0 if gradient == 1.0 else 0.0)
        scaler.scale(loss).backward()
        if gradient != 1.0:
            weight.grad[0] = gradient
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale(), scaler._get_growth_tracker()


def side_by_side(torchs, ours, random_):
    """Compare two scalers until torch's scale is no normal number any more."""
    gradients = sequence(random_)
    fused = random_.random() < 0.3
    walks = []
    for scaler in (torchs, ours):
        weight = parameter([1.0, 2.0])
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        walks.append(walk(scaler, gradients, weight, optimizer))
    for expected, found in zip(*walks, strict=True):
        if not NORMAL <= expected[0] < math.inf:
            assert NORMAL <= found[0] < math.inf
            return
        assert expected == found


@pytest.mark.parametrize("seed", range(10))
def test_torchs_arguments_give_torchs_trajectory(seed):
    random_ = random.Random(seed)
    for _ in range(100):
        arguments = {
            "init_scale": random_.choice(
                (
                    2.0**16,
                    1.0,
                    2.0**120,
                    2.0**-120,
                    3.7,
                    2.0 ** random_.uniform(-99, 99),
                )
            ),
            "growth_factor": random_.choice(GROWTH),
            "backoff_factor": random_.choice(BACKOFF),
            "growth_interval": random_.choice(INTERVALS),
        }
        side_by_side(
            torch.amp.GradScaler("cpu", **arguments),
            ls.GradScaler("cpu", **arguments, max_consecutive_skips=None),
            random_,
        )


@pytest.mark.parametrize("seed", range(3))
def test_the_preset_gives_torchs_trajectory(seed):
    """With factors that are float32 numbers; others the preset rounds to some."""
    random_ = random.Random(seed)
    for _ in range(30):
        arguments = {
            "init_scale": 2.0 ** random_.randint(-120, 120),
            "growth_factor": random_.choice((2.0, 4.0, 1.5)),
            "backoff_factor": random_.choice((0.5, 0.25, 0.75)),
            "growth_interval": random_.choice((1, 2, 5)),
        }
        side_by_side(
            torch.amp.GradScaler("cpu", **arguments),
            ls.GradScaler("cpu", policy=presets.get("torch", **arguments)),
            random_,
        )


def test_setters_are_followed_as_torch_follows_them():
    random_ = random.Random(1)
    for _ in range(25):
        both = torch.amp.GradScaler("cpu"), ls.GradScaler("cpu")
        for _ in range(3):
            growth, backoff = random_.choice(GROWTH), random_.choice(BACKOFF)
            interval = random_.choice((1, 2, 2000))
            for scaler in both:
                # At or below the tracker, torch would not grow: that is a defect.
                init_scale_tensor(scaler)._growth_tracker.zero_()
                scaler.set_growth_factor(growth)
                scaler.set_backoff_factor(backoff)
                scaler.set_growth_interval(interval)
                assert (growth, backoff, interval) == (
                    scaler.get_growth_factor(),
                    scaler.get_backoff_factor(),
                    scaler.get_growth_interval(),
                )
            side_by_side(*both, random_)


def test_numbers_set_by_hand_are_followed():
    """Some set torch's private attributes instead of calling the setters."""
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    scaler._growth_interval, scaler._growth_factor = 1, 4.0
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=0.0)
    assert [(32.0, 0), (128.0, 0)] == list(walk(scaler, [1.0, 1.0], weight, optimizer))


def test_growth_to_the_very_end_of_float32_is_that_of_torch():
    """A product that only rounding brings back into float32."""
    largest = float(np.finfo(np.float32).max)
    arguments = {
        "init_scale": largest / 2,
        "growth_factor": 2.00000001,
        "growth_interval": 1,
    }
    found = []
    for cls in (torch.amp.GradScaler, ls.GradScaler):
        weight = parameter([1.0])
        optimizer = torch.optim.SGD([weight], lr=0.0)
        found += walk(cls("cpu", **arguments), [1.0], weight, optimizer)
    assert found[0] == found[1]


# Policies


def numpys(policy, gradients):
    """Return the trajectory that the policy itself gives on NumPy's numbers."""
    scale, good, bad = policy.init()
    state = type(policy.init())(np.float32(scale), np.int32(good), np.int32(bad))
    for gradient in gradients:
        signal = Signal(finite=np.bool_(gradient == 1.0))
        state = policy.step(state, signal, where=np.where)
        yield float(state.scale), int(state.good_steps), int(state.bad_steps)


@pytest.mark.parametrize(
    "policy",
    [
        Dynamic(init_scale=8.0, hysteresis=2, growth_interval=3),
        Dynamic(init_scale=8.0, hysteresis=3, growth_interval=2,
                consecutive_overflows=True),
        Dynamic(init_scale=8.0, growth_interval=1, min_scale=2.0, max_scale=32.0),
        Dynamic(init_scale=9.0, growth_interval=1, growth_factor=1.7, at_max="clamp",
                max_scale=50.0, backoff_factor=0.8, at_min="hold", min_scale=3.0),
        Dynamic(init_scale=9.0, growth_factor=3.0, backoff_divisor=3.0,
                growth_interval=2, growth_delay="first"),
        Fixed(24.0),
        presets.get("megatron", growth_interval=3),
    ],
    ids=["hysteresis", "consecutive", "bounds", "1.7", "divisor", "fixed", "megatron"],
)  # fmt: skip
def test_a_policy_moves_the_scale_as_it_does_elsewhere(policy):
    random_ = random.Random(3)
    for _ in range(20):
        gradients = sequence(random_)
        scaler = ls.GradScaler("cpu", policy=policy)
        weight = parameter([1.0, 2.0])
        optimizer = torch.optim.SGD([weight], lr=1.0)
        expected = list(numpys(policy, gradients))
        found = []
        for scale, good in walk(scaler, gradients, weight, optimizer):
            found.append((scale, good, int(scaler.state.bad_steps)))
        assert expected == found
