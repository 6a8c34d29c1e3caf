"""Faults for a training loop of any framework, and what must hold after every step.

`plan` says what goes wrong in which step; a framework's driver carries it out on its
own tensors. The same plan serves the scaler under test and the framework's own, so that
the two can be compared.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

VALUES = {
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
    "largest": None,  # of the gradient's dtype
    "1e20": 1e20,
    "subnormal": None,
    "zero": 0.0,
    "missing": None,  # no gradient at all
}
"""The kinds of faults, and the number that each writes into a gradient."""


class InjectedError(Exception):
    """Raised by a driver in the middle of a step, where the plan says so."""


class Fault(NamedTuple):
    """One number that is written into a gradient, still scaled."""

    kind: str
    tensor: float
    """Which gradient, from 0 to 1: the driver multiplies by how many there are."""
    element: float
    """Which number of it, likewise."""


class Step(NamedTuple):
    """What goes wrong in one step."""

    number: int
    faults: tuple[Fault, ...] = ()
    raises_at: str | None = None
    """The call of the step at which an `InjectedError` is raised."""
    resumes: bool = False
    """Whether everything is saved and loaded into new objects before the step."""


def plan(steps: int, seed: int, calls: tuple[str, ...]) -> Iterator[Step]:
    """Yield what happens in each step: clean ones, single faults and bursts.

    Args:
        steps: How many steps.
        seed: The same seed gives the same plan.
        calls: The calls of a step at which an exception can be raised.
    """
    rng = random.Random(seed)
    burst, left = "", 0
    for number in range(steps):
        if not left and rng.random() < 1 / 400:
            burst, left = rng.choice(list(VALUES)), rng.randint(100, 300)
        faults = []
        if left:
            left -= 1
            faults = [_fault(rng, burst)]
        elif rng.random() < 0.35:
            count = rng.randint(1, 3)
            faults = [_fault(rng, rng.choice(list(VALUES))) for _ in range(count)]
        raises = rng.choice(calls) if calls and rng.random() < 0.02 else None
        yield Step(number, tuple(faults), raises, rng.random() < 0.01)


def _fault(rng: random.Random, kind: str) -> Fault:
    return Fault(kind, rng.random(), rng.random())


def value(kind: str, dtype: str) -> float:
    """Return the number that a kind of fault writes into a gradient of a dtype."""
    limits = np.finfo("float32" if dtype == "bfloat16" else dtype)
    if kind == "largest":
        # bfloat16 has the exponents of float32 and eight digits.
        return math.ldexp(255.0, 120) if dtype == "bfloat16" else float(limits.max)
    if kind == "subnormal":
        return float(limits.smallest_normal) / 4
    number = VALUES[kind]
    if number is None:
        message = f"A {kind} gradient has no number."
        raise ValueError(message)
    return number


def check_finite(step: int, arrays: Mapping[str, object]) -> None:
    """Raise unless every number of every array is finite; names the first that is not.

    Integers and booleans are finite.
    """
    for name, array in arrays.items():
        numbers = np.asarray(array)
        if numbers.dtype.kind in "biu":
            continue
        if not np.isfinite(numbers.astype(np.float64)).all():
            kind = "NaN" if np.isnan(numbers.astype(np.float64)).any() else "infinite"
            raise BrokenError(step, f"{name} is {kind}")


def check_unchanged(
    step: int, before: Mapping[str, object], after: Mapping[str, object]
) -> None:
    """Raise unless a skipped step has left every array as it was, bit for bit."""
    if before.keys() != after.keys():
        names = sorted(before.keys() ^ after.keys())
        raise BrokenError(step, f"a skipped step added or removed {names[:3]}")
    for name, array in before.items():
        old, new = np.asarray(array), np.asarray(after[name])
        if old.dtype != new.dtype or old.tobytes() != new.tobytes():
            raise BrokenError(step, f"a skipped step changed {name}")


def check_scale(step: int, scale: float, low: float, high: float) -> None:
    """Raise unless a scale is a number within bounds."""
    if not low <= scale <= high:
        raise BrokenError(step, f"the scale is {scale!r}, not in [{low!r}, {high!r}]")


class BrokenError(AssertionError):
    """What must never happen has happened."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"after step {step}, {what}")
        self.step = step
        self.what = what


class Outcome(NamedTuple):
    """What became of a run."""

    optimizer: str
    scaler: str
    steps: int
    applied: int
    skipped: int
    scale: float
    """At the end."""
    broken: str
    """What went wrong first, and when; nothing if nothing did."""


def table(outcomes: Iterable[Outcome]) -> str:
    """Return outcomes as rows of a Markdown table."""
    rows = [
        "| optimizer | scaler | steps | applied | skipped | last scale | outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {one.optimizer} | {one.scaler} | {one.steps:,} | {one.applied:,} "
        f"| {one.skipped:,} | {one.scale:g} | {one.broken or 'all finite'} |"
        for one in outcomes
    ]
    return "\n".join(rows)
