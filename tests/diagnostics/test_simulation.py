"""The simulation: the same as stepping, whatever the policy."""

import random
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.recordings import tensorflow_contrib
from helpers.sequences import overflow_pattern
from helpers.traces import read, replay

from lossscale import Dynamic, Fixed, ScaleState, presets
from lossscale.core.errors import SettingError
from lossscale.diagnostics import simulate
from lossscale.diagnostics import simulation as module


def small(name):
    preset = presets.PRESETS[name].policy
    return presets.get(name, growth_interval=3, init_scale=max(8.0, preset.min_scale))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_goes_as_it_does_step_by_step(name):
    rng = random.Random(name)
    policy = small(name)
    for _ in range(10):
        flags = overflow_pattern(rng, 400)
        (result,) = simulate([policy], np.array(flags))
        expected = replay(policy, flags)
        steps = np.arange(1, 401)
        assert [s.scale for s in expected] == result.scale_after(steps).tolist()
        assert expected[-1] == ScaleState(*(value.item() for value in result.final))
        assert flags.count(False) == result.skipped


def test_the_recorded_manager_is_simulated_bit_for_bit():
    for row in read("tensorflow/unit_exponential.tf1.15.5.eager"):
        policy = tensorflow_contrib(row["config"])
        (result,) = simulate([policy], np.array(row["finite"]))
        steps = np.arange(1, len(row["scale"]) + 1)
        assert row["scale"] == result.scale_after(steps).tolist()


def test_growths_and_back_offs_are_counted():
    flags = np.array([True, True, False, True, True, True, True])
    (result,) = simulate([Dynamic(growth_interval=2)], flags)
    assert (3, 1) == (result.growths, result.backoffs)
    assert [0, 2, 3, 5, 7] == result.steps.tolist()


@dataclass(frozen=True)
class AlwaysDown:
    def init(self):
        return ScaleState(1024.0, 0, 0)

    def step(self, state, signal, *, where):
        return state._replace(scale=where(signal.finite, state.scale, state.scale / 2))


def test_policies_of_any_kind_run_side_by_side():
    flags = np.array([True, False, True])
    results = simulate([Fixed(8.0), AlwaysDown(), Dynamic()], flags)
    assert [8.0, 512.0, 32768.0] == [r.final.scale.item() for r in results]


def test_progress_is_told_once_for_each_policy():
    calls = []
    simulate([Dynamic(), Fixed()], np.ones(3, bool), on_policy=lambda: calls.append(1))
    assert 2 == len(calls)


@pytest.mark.parametrize("wrong", [[[True]], [1, 0], ["yes"], 3])
def test_a_sequence_of_anything_but_booleans_is_refused(wrong):
    with pytest.raises(SettingError, match="one row of booleans"):
        simulate([Dynamic()], wrong)


def test_without_numba_it_warns_once_and_gives_the_same(monkeypatch):
    flags = np.random.default_rng(0).random(200) > 0.1
    policy = Dynamic(growth_interval=5)
    (fast,) = simulate([policy], flags)
    monkeypatch.setitem(sys.modules, "numba", None)
    module._compiled.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"pip install 'lossscale\[cli\]'"):
        (slow,) = simulate([policy], flags)
    module._compiled.cache_clear()
    assert fast.steps.tolist() == slow.steps.tolist()
    assert fast.scales.tolist() == slow.scales.tolist()
    assert fast.final == slow.final
