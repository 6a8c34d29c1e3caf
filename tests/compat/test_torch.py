"""The torch preset against torch's own update, and torch's state dict."""

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.rules import run_rule  # noqa: E402
from helpers.sequences import draw, overflow_pattern  # noqa: E402
from helpers.traces import check_equal_while, replay  # noqa: E402

from lossscale import Dynamic, ScaleState, presets  # noqa: E402
from lossscale.convert import from_library, to_library  # noqa: E402
from lossscale.core.validation import SMALLEST_NORMAL  # noqa: E402


def original(config, flags):
    """Return (scale, tracker) after each step of torch's kernel."""
    scale = torch.tensor(config["init_scale"], dtype=torch.float32)
    tracker = torch.tensor(0, dtype=torch.int32)
    states = []
    for flag in flags:
        found = torch.tensor(0.0 if flag else 1.0)
        torch._amp_update_scale_(
            scale,
            tracker,
            found,
            config["growth_factor"],
            config["backoff_factor"],
            config["growth_interval"],
        )
        states.append((scale.item(), tracker.item()))
    return states


def test_the_preset_takes_torchs_steps():
    rng = random.Random(1)
    for _ in range(1000):
        config = draw(
            rng,
            init_scale=(1.0, 3.0, 2.0**16, 1e-30, 1e38, 2.0**126),
            # float32 numbers all: torch multiplies in float64 and rounds once, which
            # for a factor such as 0.8 is not the product with the rounded factor.
            growth_factor=(2.0, 1.75, 3.0, 4.0, 10.0, 1.0009765625),
            backoff_factor=(0.5, 0.75, 0.25, 0.625),
            growth_interval=(1, 2, 3, 5, 10),
        )
        flags = overflow_pattern(rng, rng.randint(20, 100))
        states = replay(presets.get("torch", **config), flags)
        check_equal_while(
            original(config, flags),
            [(state.scale, state.good_steps) for state in states],
            lambda pair: pair[0] >= SMALLEST_NORMAL,
            config,
        )


def test_torch_runs_off_to_zero_and_ours_stops_where_the_reciprocal_is_finite():
    policy = presets.get("torch")
    config = {
        "init_scale": policy.init_scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.growth_interval,
    }
    flags = [False] * 200
    theirs = [scale for scale, _ in original(config, flags)]
    ours = [state.scale for state in replay(policy, flags)]
    assert 0.0 == theirs[-1]
    assert SMALLEST_NORMAL == ours[-1]
    assert 142 == check_equal_while(theirs, ours, lambda s: s >= SMALLEST_NORMAL, "")


@pytest.mark.parametrize("compiled", [False, True])
def test_the_rule_runs_on_torch_tensors(compiled):
    def compile_rule(function):
        torch._dynamo.reset()  # 64 policies are 64 graphs of one function
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    run_rule(
        array=torch.tensor,
        dtypes=(torch.float32, torch.int32),
        where=torch.where,
        compile_rule=compile_rule if compiled else None,
    )


def test_the_defaults_are_torchs():
    saved = torch.amp.GradScaler("cpu").state_dict()
    policy, state = from_library("torch", saved)
    assert presets.get("torch") == policy
    assert policy.init() == state


def test_torch_grows_only_exactly_at_the_interval_and_ours_at_it_or_above():
    config = {"init_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    scale, tracker = torch.tensor(8.0), torch.tensor(5, dtype=torch.int32)
    torch._amp_update_scale_(scale, tracker, torch.tensor(0.0), 2.0, 0.5, 3)
    assert (8.0, 6) == (scale.item(), tracker.item())
    policy = presets.get("torch", growth_interval=3, **config)
    (state,) = replay(policy, [True], ScaleState(8.0, 5, 0))
    assert 16.0 == state.scale


def test_torch_applies_a_gradient_that_overflows_by_unscaling_and_ours_does_not():
    import numpy as np

    import lossscale.numpy as ls

    scaler = torch.amp.GradScaler("cpu", init_scale=0.25)
    scaler.scale(torch.ones(1))
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([3e38])
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    assert not torch.isfinite(weight).all()
    state = ls.init(Dynamic(), ScaleState(0.25, 0, 0))
    _, signal = ls.unscale([np.float32([3e38])], state)
    assert not signal.finite


def test_a_torch_state_dict_is_read_and_written():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scaler.scale(torch.ones(1))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in (True, True, False, True):
        weight.grad = torch.full((2,), 1.0 if finite else torch.inf)
        scaler.step(optimizer)
        scaler.update()
    policy, state = from_library("torch", scaler.state_dict())
    assert presets.get("torch", growth_interval=3) == policy
    assert ScaleState(4.0, 1, 0) == state

    written = to_library("torch", policy, state)
    assert scaler.state_dict() == written.values
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(written.values)
    assert 4.0 == other.get_scale()


def test_tensors_in_a_state_are_read_as_numbers():
    saved = {
        "scale": torch.tensor([8.0]),
        "growth_tracker": 2,
        "hysteresis_tracker": 1,
    }
    policy, state = from_library("megatron", saved)
    assert isinstance(policy, Dynamic)
    assert ScaleState(8.0, 2, 1) == state
