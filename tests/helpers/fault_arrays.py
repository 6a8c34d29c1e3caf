"""Faults in gradients that are NumPy arrays, and one loop over a plan of them."""

import math
from collections.abc import Sequence

import numpy as np

from helpers.faults import (
    BrokenError,
    Fault,
    InjectedError,
    Outcome,
    check_finite,
    check_scale,
    check_unchanged,
    plan,
    value,
)
from lossscale.testing.numpy import inject

SHAPES = ((5,), (3, 4), (1,))
SLOPES = [
    np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for shape in SHAPES
]
"""The gradients of a loss that is linear in the weights, without faults."""

RATE = 1e-3
INTERVAL = 3
"""Growth so often that, with all the overflows, the scale moves through its range."""


def written(faults: Sequence[Fault]) -> list[np.ndarray | None]:
    """Return what faults write into each gradient, where `hit` says.

    `None` for a gradient that is missing; there is always one that is not.
    """
    arrays: list[np.ndarray | None] = [np.zeros(shape, np.float32) for shape in SHAPES]
    for fault in faults:
        index = int(fault.tensor * len(arrays))
        array = arrays[index]
        if array is None:
            continue
        if fault.kind == "missing":
            arrays[index] = None
        else:
            number = value(fault.kind, "float32")
            place = int(fault.element * array.size)
            arrays = inject(
                arrays, f"[{index}]", number, step=1, steps=1, element=place
            )
    if all(array is None for array in arrays):
        arrays[0] = np.zeros(SHAPES[0], np.float32)
    return arrays


def hit(faults: Sequence[Fault]) -> list[np.ndarray]:
    """Return which numbers of each gradient are written by faults."""
    masks = [np.zeros(shape, bool) for shape in SHAPES]
    for fault in faults:
        mask = masks[int(fault.tensor * len(masks))]
        mask.reshape(-1)[int(fault.element * mask.size)] = fault.kind != "missing"
    return masks


def has_overflow(faults: Sequence[Fault]) -> bool:
    """Whether a fault that is not finite is left in some gradient."""
    return any(
        array is not None and not np.isfinite(array).all() for array in written(faults)
    )


class Loop:
    """What a framework's loop has in common; a driver adds the rest."""

    applied = skipped = resumed = 0
    low, high = 1.0, 2.0**127
    parts: tuple[str, ...] = ()
    """The attributes that `make` sets."""
    _others: dict[str, object] | None = None
    counts_skipped = False
    """Whether the step counter moves on a skipped step too."""
    _last: dict[str, np.ndarray] | None = None
    """Weights and optimizer state after the last step."""

    def take(self, step) -> None:
        """Take one step; raise if it has broken anything."""
        if step.resumes:
            self.resume()
            self._last = None
        before = self.arrays() if self._last is None else self._last
        count = self.count()
        try:
            self.iterate(step)
            complete = True
        except InjectedError:
            complete = False  # the step may have been taken, or not
        after = self._last = self.arrays()
        check_finite(step.number, after)
        check_scale(step.number, self.scale(), self.low, self.high)
        if not complete:
            return
        if self.counts_skipped:
            applied = any(
                before[name].tobytes() != after[name].tobytes() for name in before
            )
        else:
            applied = self.count() != count
        self.applied += applied
        self.skipped += not applied
        if not applied:
            # A step that is traced makes the state of TensorFlow 1's optimizers.
            known = {name: array for name, array in after.items() if name in before}
            check_unchanged(step.number, before, known)
        elif has_overflow(step.faults):
            raise BrokenError(step.number, "a step with an overflow was applied")

    def resume(self) -> None:
        """Save everything, and go on with other objects that have loaded it.

        They are new every fortieth time, and else those of the last time but one: to
        compile steps again takes hundreds of times as long as to take them.
        """
        saved = self.save()
        current = {name: getattr(self, name) for name in self.parts}
        if self._others is None or self.resumed % 40 == 0:
            self.make()
        else:
            vars(self).update(self._others)
        self._others = current
        self.resumed += 1
        self.load(saved)

    def make(self) -> None:
        """Make new weights, a new optimizer and a new wrapper."""
        raise NotImplementedError

    def save(self) -> object:
        """Return everything that a checkpoint holds."""
        raise NotImplementedError

    def load(self, saved) -> None:
        """Load what `save` returned into the objects of now."""
        raise NotImplementedError

    def iterate(self, step) -> None:
        """Take the calls of a step; an exception is raised in between if planned."""
        raise NotImplementedError

    def arrays(self) -> dict[str, np.ndarray]:
        """Return weights and optimizer state by name."""
        raise NotImplementedError

    def count(self) -> int:
        """Return the step counter."""
        raise NotImplementedError

    def scale(self) -> float:
        """Return the loss scale."""
        raise NotImplementedError


def raise_if(planned, here) -> None:
    """Raise where the plan says so."""
    if planned == here:
        raise InjectedError


def run(loop: Loop, calls, *, optimizer, scaler, steps, seed) -> Outcome:
    """Run a plan of faults; stop at the first thing that must not happen."""
    broken, taken = "", 0
    for step in plan(steps, seed, calls):
        try:
            loop.take(step)
        except BrokenError as error:
            broken = str(error)
            break
        taken += 1
    scale = loop.scale()
    if not math.isfinite(scale):
        broken = broken or f"the scale is {scale}"
    return Outcome(optimizer, scaler, taken, loop.applied, loop.skipped, scale, broken)
