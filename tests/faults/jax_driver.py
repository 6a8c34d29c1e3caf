"""Faults in a training loop of JAX and optax, and the invariants after every step."""

import io
import math
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.faults import (
    BrokenError,
    InjectedError,
    Outcome,
    check_finite,
    check_scale,
    check_unchanged,
    plan,
    value,
)

from faults.jax_steps import CONFIGURATIONS, SHAPES, make

__all__ = ["CONFIGURATIONS", "run"]

CALLS = ("before", "inside", "between", "after")


class Loop:
    """Weights, an optimizer and a scale, and one step of them with faults."""

    def __init__(self, configuration: str, *, own: bool) -> None:
        dtype = "float16" if "float16 parameters" in configuration else "float32"
        self._first = {name: jnp.ones(shape, dtype) for name, shape in SHAPES.items()}
        rng = np.random.default_rng(1)
        self._slopes = {
            name: jnp.asarray(rng.normal(size=shape), jnp.float32)
            for name, shape in SHAPES.items()
        }
        self.method = make(configuration, own=own)
        self._step = jax.jit(self.method.step)
        self._summarize = jax.jit(self._summary)
        self.params, self.state = self._first, self.method.init(self._first)
        self.applied = self.skipped = 0

    def resume(self) -> None:
        """Save everything, and continue from a new state that has loaded it."""
        file = io.BytesIO()
        saved = self.params, self.state
        np.savez(file, *[np.asarray(leaf) for leaf in jax.tree.leaves(saved)])
        file.seek(0)
        fresh = self._first, self.method.init(self._first)
        leaves = [jnp.asarray(array) for array in np.load(file).values()]
        self.params, state = jax.tree.unflatten(jax.tree.structure(fresh), leaves)
        self.state = self.method.reload(state)

    def take(self, step) -> None:
        """Run one step; raise if it violates an invariant."""
        if step.resumes:
            self.resume()
        before = self.params, self.state
        complete = False
        try:
            self._iterate(step)
            complete = True
        except InjectedError:
            pass  # the step may have been applied, or not, or in part
        # One read from the device; names are looked up if a check fails.
        summary = self._summarize(before, (self.params, self.state))
        finite, unchanged, applied, scale = np.asarray(summary).tolist()
        if not finite:
            check_finite(step.number, self._arrays(self.params, self.state))
        check_scale(step.number, scale, *self.method.bounds)
        if not complete:
            return
        self.applied += applied == 1
        self.skipped += applied == 0
        if applied == 0 and not unchanged:
            after = self._arrays(self.params, self.state)
            check_unchanged(step.number, self._arrays(*before), after)

    def _summary(self, before, after):
        """Return four numbers: all finite, nothing changed, applied, and the scale."""
        old, new = (
            jax.tree.leaves((params, self.method.read_optimizer_state(state)))
            for params, state in (before, after)
        )
        finite = [jnp.isfinite(leaf).all() for leaf in new]
        unchanged = [
            (_get_bits(old_leaf) == _get_bits(new_leaf)).all()
            for old_leaf, new_leaf in zip(old, new, strict=True)
        ]
        numbers = (
            jnp.stack(finite).all(),
            jnp.stack(unchanged).all(),
            self.method.read_applied(after[1]),
            self.method.read_scale(after[1]),
        )
        return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])

    def _iterate(self, step) -> None:
        """Run the calls of a step; raise an exception in between if planned."""
        batch = self._slopes, *self._faults(step.faults)
        if step.raises_at == "before":
            raise InjectedError
        if step.raises_at == "inside":
            with _fail_on_apply():  # a new function, so that it is traced again
                jax.jit(partial(self.method.step))(self.params, self.state, *batch)
        params, state = self._step(self.params, self.state, *batch)
        if step.raises_at == "after":
            raise InjectedError
        self.state = state
        if step.raises_at == "between":
            raise InjectedError
        self.params = params

    def _faults(self, faults):
        """Return which gradients are replaced, and the numbers that are written."""
        masks = {name: np.zeros(shape, bool) for name, shape in SHAPES.items()}
        values = {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()}
        names = list(SHAPES)
        dtype = str(self.params["a"].dtype)
        for fault in faults:
            name = names[int(fault.tensor * len(names))]
            if fault.kind == "missing":
                masks[name][:], values[name][:] = True, 0.0
                continue
            index = int(fault.element * values[name].size)
            masks[name].flat[index] = True
            values[name].flat[index] = value(fault.kind, dtype)
        return masks, values

    def _arrays(self, params, state) -> dict[str, np.ndarray]:
        """Return weights and optimizer state by name."""
        tree = {"weights": params, "state": self.method.read_optimizer_state(state)}
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _get_bits(leaf):
    """Return an array as integers: -0.0 is not 0.0."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")


@contextmanager
def _fail_on_apply():
    """Make `optax.apply_updates` raise, which a step calls last."""
    apply = optax.apply_updates

    def fail(*_):
        raise InjectedError

    optax.apply_updates = fail
    try:
        yield
    finally:
        optax.apply_updates = apply


def run(configuration, *, own, steps, seed, device="cpu") -> Outcome:
    """Run a plan of faults; stop at the first violated invariant."""
    with jax.default_device(jax.devices(device)[0]):
        loop = Loop(configuration, own=own)
        broken, completed = "", 0
        for step in plan(steps, seed, CALLS):
            try:
                loop.take(step)
            except BrokenError as error:
                broken = str(error)
                break
            completed += 1
        scale = float(loop.method.read_scale(loop.state))
    if not math.isfinite(scale):
        broken = broken or f"the scale is {scale}"
    return Outcome(
        configuration,
        loop.method.name,
        completed,
        loop.applied,
        loop.skipped,
        scale,
        broken,
    )
