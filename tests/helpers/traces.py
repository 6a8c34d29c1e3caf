"""Reads recorded traces, and replays a policy."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import lossscale.numpy as ls
from lossscale import Dynamic, Policy, ScaleState, Signal
from lossscale.core.rule import transition

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


def replay_together(rows: list[tuple[Dynamic, list[bool]]]) -> list[list[ScaleState]]:
    """Return what `replay` returns for each policy and its flags, many times faster.

    The rule is elementwise: all rows of the same switches are one vector of scales and
    one of every setting.
    """
    groups = defaultdict(list)
    for place, (policy, _) in enumerate(rows):
        groups[policy.switches].append(place)
    found = {}
    for switches, places in groups.items():
        policies = [rows[place][0] for place in places]
        flags = [rows[place][1] for place in places]
        settings = [
            np.array(column, np.float32 if isinstance(column[0], float) else np.int32)
            for column in zip(*(policy.settings for policy in policies), strict=True)
        ]
        table = np.ones((max(map(len, flags)), len(places)), bool)
        for lane, column in enumerate(flags):
            table[: len(column), lane] = column
        state = (
            np.array([policy.init_scale for policy in policies], np.float32),
            np.zeros(len(places), np.int32),
            np.zeros(len(places), np.int32),
        )
        steps = []
        for line in table:
            with np.errstate(all="ignore"):
                state = transition(*state, line, *settings, *switches, np.where)
            steps.append(state)
        columns = [np.stack(column) for column in zip(*steps, strict=True)]
        for lane, place in enumerate(places):
            length = len(flags[lane])
            own = (column[:length, lane].tolist() for column in columns)
            found[place] = list(map(ScaleState, *own))
    return [found[place] for place in range(len(rows))]


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
