"""Policies that see more than a flag, in a scaler on a device: NumPy's states.

The tests run the cases in Triton's interpreter; on a machine with a GPU they run as
they are, without a wait for the device, and a second time from a captured graph:

    PYTHONPATH=src:tests python tests/kernels/policy_cases.py [cuda]
"""

import math
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from conformance import DATA_POLICIES, magnitude_trace

import lossscale.torch as ls
from lossscale import Signal
from lossscale import numpy as reference
from lossscale.torch.inspection.summary import AMAX, HEADER, NAN, NORM
from lossscale.torch.scaler.scale_update import (
    ScaleUpdate,
    StateTensors,
    StepOutcome,
)

STEPS = 60


@contextmanager
def no_waits(device: str):
    """Make every wait for the device an error."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Loop:
    """A scaler with a policy, and an optimizer of one weight, on a device."""

    def __init__(self, device: str, policy: Any) -> None:
        self.device = device
        self.weight = torch.nn.Parameter(torch.ones(1, device=device))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0, fused=True)
        self.scaler = ls.GradScaler(device, policy=policy)
        self.magnitude = torch.zeros(1, device=device)
        self.weight.grad = torch.zeros(1, device=device)
        self.scaler.scale(torch.zeros((), device=device))

    def step(self) -> None:
        """Take a step whose gradient is the scale times the magnitude in the buffer."""
        scale = self.scaler.state.scale
        self.weight.grad.copy_((self.magnitude * scale).clamp(max=3e38))
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def set_magnitude(self, finite: bool, magnitude: Any) -> None:
        self.magnitude.fill_(float(magnitude) if finite else math.nan)

    def states(self) -> tuple[float, ...]:
        return tuple(float(value) for value in self.scaler.state)


def next_state(policy: Any, state: Any, finite: bool, magnitude: Any) -> Any:
    """Return NumPy's state after a step."""
    with np.errstate(over="ignore"):
        amax = np.float32(min(magnitude * state.scale, np.float32(3e38)))
    if not finite:
        amax = np.float32(0.0)
    return reference.update(policy, state, Signal(finite, amax=amax))


def check_policy(device: str, policy: Any) -> None:
    """Raise unless the scaler has NumPy's states, and waits for nothing."""
    loop, expected = Loop(device, policy), reference.init(policy)
    for at, (finite, magnitude) in enumerate(magnitude_trace(5, STEPS)):
        loop.set_magnitude(finite, magnitude)
        if at == 0:  # kernels are compiled
            loop.step()
        else:
            with no_waits(device), np.errstate(all="ignore"):
                loop.step()
        expected = next_state(policy, expected, finite, magnitude)
        _require_same(policy, at, expected, loop.states())


def check_graph(device: str, policy: Any) -> None:
    """Raise unless a captured step has NumPy's states."""
    loop, expected = Loop(device, policy), reference.init(policy)
    trace = magnitude_trace(7, STEPS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for finite, magnitude in trace[:3]:
            loop.set_magnitude(finite, magnitude)
            loop.step()
            expected = next_state(policy, expected, finite, magnitude)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.step()
    for at, (finite, magnitude) in enumerate(trace[3:]):
        loop.set_magnitude(finite, magnitude)
        graph.replay()
        expected = next_state(policy, expected, finite, magnitude)
        _require_same(policy, at, expected, loop.states())


def first_state(device: str, policy: Any, update: ScaleUpdate) -> StateTensors:
    """Return the first state of a policy on a device."""
    scale, good, bad, *memory = (
        torch.tensor(value, dtype=dtype, device=device)
        for value, dtype in zip(
            reference.init(policy),
            [torch.float32, torch.int32, torch.int32, *[torch.float32] * 99],
            strict=False,
        )
    )
    counters = torch.zeros(3, dtype=torch.int32, device=device)
    settings = update.make_settings(torch.device(device))
    return StateTensors(scale, good, bad, counters, settings, tuple(memory))


def check_flags(device: str, policy: Any) -> None:
    """Raise unless the policy's kernel has NumPy's states whatever flags it is given.

    Every step says at random whether a gradient, the loss and the optimizer's bounds
    were kept, and whether the magnitudes were measured.
    """
    rule = replace(policy.rule, hold_on_nonfinite_loss=True)
    policy = replace(policy, rule=rule)
    update = ScaleUpdate(policy, in_float64=False)
    state, here = reference.init(policy), first_state(device, policy, update)
    rng, skips, consecutive = random.Random(11), 0, 0
    for at, (finite, magnitude) in enumerate(magnitude_trace(11, STEPS)):
        knows_loss, measures = rng.random() < 0.7, rng.random() < 0.7
        loss_finite = finite or rng.random() < 0.5
        too_large = not finite and rng.random() < 0.3
        nan = not finite and rng.random() < 0.5
        with np.errstate(over="ignore"):
            amax = np.float32(min(magnitude * state.scale, np.float32(3e38)))
        flags = torch.tensor([not finite, not finite, too_large], dtype=torch.float32)
        measured = torch.zeros(HEADER)
        measured[NAN], measured[AMAX], measured[NORM] = nan, float(amax), 1.0
        measured = measured.to(device) if measures else None
        loss = torch.full((), float(not loss_finite), device=device)
        outcome = StepOutcome(flags.to(device), 1, 2, loss if knows_loss else None)
        with np.errstate(all="ignore"):
            update._launch_policy(here, outcome, measured)
        signal = Signal(finite, too_large=too_large)
        if knows_loss:
            signal = signal._replace(loss_finite=loss_finite)
        if measures:
            signal = signal._replace(nan=nan, amax=amax, norm=np.float32(1.0))
        state = reference.update(policy, state, signal)
        skips += not finite
        consecutive = 0 if finite else consecutive + 1
        have = tuple(float(value) for value in (*here[:3], *here.memory))
        _require_same(policy, at, tuple(map(float, state)), have)
        counted = here.counters.tolist()
        if counted != [at + 1, skips, consecutive]:
            message = f"{policy}: after step {at + 1} the counters are {counted}"
            raise AssertionError(message)


def _require_same(policy: Any, at: int, expected: Any, have: Any) -> None:
    want = tuple(float(value) for value in expected)
    if want != have:
        message = f"{policy}: after step {at + 1} expected {want}, got {have}"
        raise AssertionError(message)


def every_check(device: str) -> Iterable[tuple[str, Callable[[], None]]]:
    """Return all checks by name."""
    for policy in DATA_POLICIES:
        name = type(policy).__name__
        yield name, lambda policy=policy: check_policy(device, policy)
        yield f"{name}, flags", lambda policy=policy: check_flags(device, policy)
        if device != "cpu":
            yield f"{name}, captured", lambda policy=policy: check_graph(device, policy)


def main(arguments: list[str]) -> int:
    """Run all checks on a device and say which failed."""
    device = arguments[0] if arguments else "cuda"
    passed = failed = 0
    for name, run in every_check(device):
        try:
            run()
        except Exception as error:  # noqa: BLE001, PERF203  # all of them are shown
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)  # noqa: T201
        else:
            passed += 1
    print(f"{passed} passed, {failed} failed")  # noqa: T201
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
