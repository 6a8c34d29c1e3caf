"""Reads recorded traces, and replays a policy."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import lossscale.numpy as ls
from lossscale import Policy, ScaleState, Signal

DATA = Path(__file__).parent.parent / "data"


def read(name: str) -> list[dict]:
    """Return the rows of a compressed trace file; none is an error."""
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if not rows:
        message = f"{name} is empty"
        raise AssertionError(message)
    return rows


def replay(policy: Policy, finite: Iterable[bool], state=None) -> list[ScaleState]:
    """Return the state after each step, as Python numbers."""
    current = ls.init(policy, state)
    states = []
    for flag in finite:
        current = ls.update(policy, current, Signal(flag))
        states.append(ScaleState(*(value.item() for value in current)))
    return states


def check_equal_while(expected: list, actual: list, valid, what: object) -> int:
    """Raise unless the two agree on every step until `valid` is False of expected.

    Returns how many steps were compared; none at all is an error too.
    """
    compared = 0
    for step, (want, have) in enumerate(zip(expected, actual, strict=True), start=1):
        if not valid(want):
            break
        if want != have:
            message = f"{what}: after step {step} expected {want!r}, got {have!r}"
            raise AssertionError(message)
        compared += 1
    if not compared:
        message = f"{what}: nothing was compared"
        raise AssertionError(message)
    return compared
