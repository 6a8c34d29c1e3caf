"""The alarm after many skips, and what a policy receives."""

import math
import warnings
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import init_scale_tensor, parameter, step  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic, ScaleState  # noqa: E402
from lossscale.errors import (  # noqa: E402
    CollapseError,
    CollapseWarning,
    SettingError,
    SettingTypeError,
)


def problem(fused=False, lr=1.0):
    weight = parameter([1.0])
    return weight, torch.optim.SGD([weight], lr=lr, fused=fused)


# The alarm


def test_after_many_skips_it_warns_once_and_says_what_was_seen():
    weight, optimizer = problem()
    scaler = init_scale_tensor(
        ls.GradScaler(
            "cpu", init_scale=64.0, max_consecutive_skips=4, names=[("head", weight)]
        )
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for gradient in (math.inf, math.nan, math.inf, math.inf, *[math.inf] * 6):
            step(scaler, optimizer, gradient, [weight])
    assert [CollapseWarning] == [one.category for one in caught]
    text = str(caught[0].message)
    for part in (
        "4 consecutive steps were skipped",
        "Scales: 64; 32; 16; 8.",
        "Reasons: 3 inf, 1 nan.",
        "head (inf)",
        "gradients may be overflowing because of the scale",
    ):
        assert part in text


def test_the_alarm_may_raise_and_the_update_is_complete():
    weight, optimizer = problem()
    scaler = init_scale_tensor(
        ls.GradScaler(
            "cpu", init_scale=64.0, max_consecutive_skips=2, on_collapse="raise"
        )
    )
    step(scaler, optimizer, math.nan, [weight])
    with pytest.raises(CollapseError, match="a NaN can come of that too"):
        step(scaler, optimizer, math.nan, [weight])
    assert (16.0, 2, 2) == (
        scaler.get_scale(),
        scaler.total_steps,
        scaler.skipped_steps,
    )
    assert {} == dict(scaler._per_optimizer_states)
    step(scaler, optimizer, 1.0, [weight])
    step(scaler, optimizer, math.nan, [weight])
    with pytest.raises(CollapseError):
        step(scaler, optimizer, math.nan, [weight])


def test_an_applied_step_between_skipped_ones_keeps_the_alarm_quiet():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", max_consecutive_skips=2, on_collapse="raise")
    for gradient in (math.inf, 1.0) * 10:
        step(scaler, optimizer, gradient, [weight])
    assert (10, None) == (scaler.skipped_steps, scaler.flush())


# What a policy receives


@dataclass(frozen=True)
class Watching:
    """Keeps what it receives in a list."""

    received: tuple[list] = ([],)

    def init(self):
        return ScaleState(8.0, 0, 0)

    def step(self, state, signal, *, where):
        self.received[0].append(signal)
        return state._replace(scale=where(signal.finite, state.scale, state.scale / 4))


@pytest.mark.parametrize("fused", [False, True])
def test_a_policy_of_ones_own_moves_the_scale(fused):
    policy = Watching(([],))
    weight, optimizer = problem(fused)
    scaler = ls.GradScaler("cpu", policy=policy)
    for gradient in (8.0, math.nan, math.inf):
        step(scaler, optimizer, gradient, [weight])
    assert (0.5, 0.0) == (scaler.get_scale(), weight.item())
    assert [True, False, False] == [
        bool(received.finite) for received in policy.received[0]
    ]
    assert [False, True, False] == [
        bool(received.nan) for received in policy.received[0]
    ]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("measure_norm", [False, True])
def test_a_policy_receives_numbers_that_were_measured_or_none(fused, measure_norm):
    policy = Watching(([],))
    weight, optimizer = problem(fused)
    scaler = ls.GradScaler("cpu", policy=policy, measure_norm=measure_norm)
    step(scaler, optimizer, -16.0, [weight])
    (received,) = policy.received[0]
    assert received.amax is None or received.amax.item() == 16.0
    assert received.norm is None or received.norm.item() == 2.0
    assert not measure_norm or received.norm is not None


def test_a_policy_and_torchs_numbers_exclude_each_other():
    with pytest.raises(SettingError, match="policy= was given together with"):
        ls.GradScaler("cpu", init_scale=8.0, policy=Dynamic())
    with pytest.raises(SettingTypeError, match="policy must be a policy"):
        ls.GradScaler("cpu", policy="torch")
    with pytest.raises(SettingError, match="growth_interval"):
        ls.GradScaler("cpu", policy=Dynamic()).set_growth_interval(3)


@pytest.mark.parametrize(
    "settings",
    [
        {"on_no_gradients": "skip"},
        {"on_collapse": "stop"},
        {"max_consecutive_skips": 0},
        {"allow_fp16": 1},
        {"measure_norm": "yes"},
    ],
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        ls.GradScaler("cpu", **settings)
