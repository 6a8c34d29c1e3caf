"""Policies that see more than a flag, in a GradScaler."""

import copy
import math
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conformance import DATA_POLICIES, magnitude_trace  # noqa: E402
from helpers.torch_steps import init_scale_tensor, one_weight  # noqa: E402

import lossscale.numpy as reference  # noqa: E402
import lossscale.torch as ls  # noqa: E402
from lossscale import (  # noqa: E402
    Dynamic,
    Headroom,
    Signal,
    from_portable,
    to_portable,
)
from lossscale.errors import StateError  # noqa: E402

every_policy = pytest.mark.parametrize(
    "policy", DATA_POLICIES, ids=lambda policy: type(policy).__name__
)


def take(scaler, optimizer, weight, finite, magnitude):
    """Take a step whose largest gradient is known."""
    scale = init_scale_tensor(scaler).get_scale()
    amax = min(float(magnitude) * scale, 3e38)
    weight.grad = torch.tensor([amax if finite else math.inf])
    scaler.step(optimizer)
    scaler.update()
    return amax if finite else 0.0


def plain(state):
    return tuple(float(value) for value in state)


def run(scaler, trace):
    """Run a trace; return the states after every step."""
    weight, optimizer = one_weight()
    states = []
    for finite, magnitude in trace:
        take(scaler, optimizer, weight, finite, magnitude)
        states.append(plain(scaler.state))
    return states


@every_policy
def test_a_trace_gives_the_states_of_numpy(policy):
    scaler = ls.GradScaler("cpu", policy=policy)
    weight, optimizer = one_weight()
    expected = reference.init(policy)
    for finite, magnitude in magnitude_trace(5):
        amax = take(scaler, optimizer, weight, finite, magnitude)
        signal = Signal(finite, amax=np.float32(amax))
        if finite and amax > math.sqrt(np.finfo(np.float32).max) * expected.scale:
            continue  # too large for an optimizer: the state stays
        expected = reference.update(policy, expected, signal)
        assert plain(expected) == plain(scaler.state)


@every_policy
def test_a_saved_scaler_continues_exactly(policy):
    trace = magnitude_trace(7, 60)
    whole = run(ls.GradScaler("cpu", policy=policy), trace)
    first = ls.GradScaler("cpu", policy=policy)
    run(first, trace[:25])
    for second in (
        ls.GradScaler("cpu", policy=policy),
        init_scale_tensor(ls.GradScaler("cpu", policy=policy)),
    ):
        second.load_state_dict(first.state_dict())
        assert plain(first.state) == plain(second.state)
        assert whole[25:] == run(second, trace[25:])


@every_policy
def test_a_scaler_that_is_copied_or_pickled_continues_exactly(policy):
    trace = magnitude_trace(7, 40)
    whole = run(ls.GradScaler("cpu", policy=policy), trace)
    first = ls.GradScaler("cpu", policy=policy)
    run(first, trace[:25])
    for second in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):  # noqa: S301
        assert plain(first.state) == plain(second.state)
        assert whole[25:] == run(second, trace[25:])


@every_policy
def test_a_portable_state_starts_another_scaler(policy):
    first = ls.GradScaler("cpu", policy=policy)
    run(first, magnitude_trace(7, 25))
    same, state = from_portable(to_portable(first.policy, first.state))
    second = ls.GradScaler("cpu", policy=same, state=state)
    assert plain(first.state) == plain(second.state)
    assert plain(first.state) == plain(init_scale_tensor(second).state)


def test_the_state_dict_of_a_plain_policy_has_no_further_entry():
    assert {
        *("scale", "growth_factor", "backoff_factor", "growth_interval"),
        *("_growth_tracker", "bad_steps"),
        *("total_steps", "skipped_steps", "consecutive_skips"),
    } == set(ls.GradScaler("cpu", policy=Dynamic()).state_dict())


def test_torch_s_own_state_dict_is_loaded_and_nothing_is_remembered():
    scaler = ls.GradScaler("cpu", policy=Headroom())
    run(scaler, magnitude_trace(7, 25))
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    assert (8.0, 0.0, 0.0, 0.0, 0.0, 0.0) == plain(scaler.state)


def test_a_malformed_memory_changes_nothing():
    scaler = ls.GradScaler("cpu", policy=Headroom())
    run(scaler, magnitude_trace(7, 25))
    before = plain(scaler.state)
    for wrong in ("peak", {"peak": math.nan, "last_peak": 0.0, "age": 0.0}):
        state_dict = scaler.state_dict() | {"memory": wrong}
        with pytest.raises(StateError):
            scaler.load_state_dict(state_dict)
        assert before == plain(scaler.state)


def test_a_scale_that_is_set_leaves_what_is_remembered():
    scaler = ls.GradScaler("cpu", policy=Headroom())
    weight, optimizer = one_weight()
    take(scaler, optimizer, weight, True, 0.5)
    memory = plain(scaler.state)[3:]
    init_scale_tensor(scaler)
    weight.grad = torch.ones(1)
    scaler.step(optimizer)
    scaler.update(16.0)
    assert (16.0, *memory) == (scaler.get_scale(), *plain(scaler.state)[3:])


def test_the_largest_gradient_of_several_optimizers_counts():
    scaler = init_scale_tensor(
        ls.GradScaler("cpu", policy=Headroom(Dynamic(init_scale=4.0)))
    )
    pairs = [one_weight() for _ in range(2)]
    for (weight, _), gradient in zip(pairs, (8.0, 32.0), strict=True):
        weight.grad = torch.tensor([gradient])
    for _, optimizer in pairs:
        scaler.step(optimizer)
    scaler.update()
    assert 8.0 == float(scaler.state.peak)


def test_a_policy_of_a_users_own_may_remember_numbers_too():
    from dataclasses import dataclass
    from typing import Any, NamedTuple

    class Counting(NamedTuple):
        scale: Any
        good_steps: Any
        bad_steps: Any
        steps: Any

    @dataclass(frozen=True)
    class CountsSteps:
        def init(self):
            return Counting(8.0, 0, 0, 0.0)

        def step(self, state, signal, *, where):
            return state._replace(steps=state.steps + 1.0)

    scaler = ls.GradScaler("cpu", policy=CountsSteps())
    run(scaler, magnitude_trace(7, 5))
    assert 5.0 == float(scaler.state.steps)
    assert {"steps": 5.0} == scaler.state_dict()["memory"]
