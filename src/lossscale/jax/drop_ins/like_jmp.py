# SPDX-License-Identifier: Apache-2.0
"""jmp's loss scales: three kinds with `scale`, `unscale` and `adjust`; two functions.

Each takes the steps of the original. Its floor survives `jit` here: settings are
static. A dtype is jmp's: float16 gradients stay float16 by a scale in float16, as
jmp's own introduction has it, or by a Python number, and become float32 by one in
float32. The arithmetic is float32 in between, and a scaled loss stays float32.
"""

import functools
import warnings
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from lossscale import presets
from lossscale.core import headroom, validation
from lossscale.core.policies import Dynamic
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.core.validation import format_value
from lossscale.errors import GradientError
from lossscale.jax import leaves, selecting, verbs
from lossscale.jax.drop_ins import trees


@dataclass(frozen=True)
class NoOpLossScale:
    """jmp's scale of 1, which does nothing.

    Example:
        >>> from lossscale.jax.drop_ins import NoOpLossScale
        >>> NoOpLossScale().scale({"loss": 3.0})
        {'loss': 3.0}
    """

    @property
    def loss_scale(self) -> int:
        """The scale: 1."""
        return 1

    def scale(self, tree: Any) -> Any:
        """Return the tree as it is."""
        return tree

    def unscale(self, tree: Any) -> Any:
        """Return the tree as it is."""
        return tree

    def adjust(self, grads_finite: Array) -> "NoOpLossScale":
        """Return the same scale."""
        del grads_finite
        return self


@dataclass(frozen=True)
class StaticLossScale:
    """jmp's scale that never moves; a constant of the compiled function.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.drop_ins import StaticLossScale
        >>> StaticLossScale(2**15).scale(jnp.float16(4.0))
        Array(131072., dtype=float32)
    """

    loss_scale: Any
    """The scale: a Python number, or a NumPy scalar if it came as an array."""

    def __post_init__(self) -> None:
        """Check the scale, unless it is being traced."""
        if isinstance(self.loss_scale, jax.core.Tracer):
            return
        validation.check_scale("loss_scale", trees.number(self.loss_scale))
        if isinstance(self.loss_scale, (jax.Array, np.ndarray)):
            object.__setattr__(self, "loss_scale", np.asarray(self.loss_scale)[()])

    def scale(self, tree: Any) -> Any:
        """Return the tree times the scale; floats in float32."""
        return _scaled(tree, self.loss_scale)

    def unscale(self, tree: Any) -> Any:
        """Return the tree divided by the scale, in jmp's dtypes."""
        return _unscaled(tree, self.loss_scale)

    def adjust(self, grads_finite: Array) -> "StaticLossScale":
        """Return the same scale."""
        del grads_finite
        return self


@dataclass(frozen=True)
class DynamicLossScale:
    """jmp's dynamic scale: two leaves, `loss_scale` and `counter`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.drop_ins import DynamicLossScale
        >>> scale = DynamicLossScale(jnp.float32(2.0**15), min_loss_scale=0.5)
        >>> scale.adjust(jnp.array(False)).loss_scale
        Array(16384., dtype=float32)
    """

    loss_scale: Any
    """The scale; float16 and bfloat16 stay, anything else is kept in float32."""
    counter: Any = 0
    """Clean steps counted towards the next growth."""
    period: int = 2000
    """How many clean steps in a row make the scale grow."""
    factor: float = 2
    """What growth multiplies and back-off divides by."""
    min_loss_scale: Any = 1.0
    """The floor, kept as a Python number. Below 2**-126 it counts as that."""

    def __post_init__(self) -> None:
        """Keep arrays in their one dtype, and check the settings."""
        _warn_unless_floating("loss_scale", self.loss_scale)
        _warn_unless_floating("min_loss_scale", self.min_loss_scale)
        period, floor = (
            trees.number(self.period),
            float(trees.number(self.min_loss_scale)),
        )
        given = getattr(self.loss_scale, "dtype", None)
        narrow = str(given) in headroom.NARROW
        values = {
            "loss_scale": jnp.asarray(self.loss_scale, given if narrow else "float32"),
            "counter": jnp.asarray(self.counter, jnp.int32),
            "period": int(period) if period == int(period) else period,
            "factor": trees.number(self.factor),
            "min_loss_scale": floor,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._policy()
        trees.tell_flax(DynamicLossScale)

    def scale(self, tree: Any) -> Any:
        """Return the tree times the scale; floats in float32."""
        return _scaled(tree, self.loss_scale)

    def unscale(self, tree: Any) -> Any:
        """Return the tree divided by the scale, in jmp's dtypes."""
        return _unscaled(tree, self.loss_scale)

    def adjust(self, grads_finite: Array) -> "DynamicLossScale":
        """Return the scale after a step.

        Args:
            grads_finite: Whether all gradients were finite, as `all_finite` says.
        """
        after = verbs.update(self._policy(), self._state(), Signal(grads_finite))
        moved = after.scale.astype(self.loss_scale.dtype)
        # A narrow scale stays where a step would lead out of its dtype.
        usable = jnp.isfinite(moved) & (moved > 0)
        scale = jnp.where(usable, moved, self.loss_scale)
        return replace(self, loss_scale=scale, counter=after.good_steps)

    def _state(self) -> ScaleState:
        return trees.state(self.loss_scale, self.counter)

    def _policy(self) -> Dynamic:
        return _policy(self.period, self.factor, self.min_loss_scale)


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale
"""Any of jmp's three kinds."""


def all_finite(tree: Any) -> Array:
    """Return whether every leaf is finite, one boolean; a tree without leaves is.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.drop_ins import all_finite
        >>> all_finite({"w": jnp.array([1.0, jnp.inf]), "b": None})
        Array(False, dtype=bool)
    """
    flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return leaves.all_set(flags)


def select_tree(pred: Array, a: Any, b: Any) -> Any:
    """Return `a` if the predicate is true, else `b`, infinities and all.

    Raises:
        GradientError: If `pred` is not one boolean; it is an AssertionError too.
        StructureError: If the two do not have the same structure, shapes and dtypes.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.drop_ins import select_tree
        >>> select_tree(jnp.array(False), jnp.int32(7), jnp.int32(6))
        Array(6, dtype=int32)
    """
    if jnp.shape(pred) != () or jnp.result_type(pred) != jnp.bool_:
        message = f"pred is {format_value(pred)}, expected boolean scalar."
        raise _PredicateError(message)
    selecting.check_same_structure(a, b)
    return selecting.choose(jnp.asarray(pred), a, b, finite_only=False)


class _PredicateError(GradientError, AssertionError):
    """jmp asserts it."""


def _scaled(tree: Any, loss_scale: Any) -> Any:
    """Return a tree times a scale: floats in float32, the rest by JAX's promotion."""
    state = trees.state(loss_scale, 0)
    return jax.tree.map(
        lambda leaf: verbs.scale(leaf, state) if _is_float(leaf) else leaf * loss_scale,
        tree,
    )


def _unscaled(tree: Any, loss_scale: Any) -> Any:
    """Return a tree divided by a scale: computed in float32, in the dtypes of jmp."""
    state = trees.state(loss_scale, 0)

    def unscale(leaf: Any) -> Any:
        if not _is_float(leaf):
            return leaf * (1 / loss_scale)
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(leaf, loss_scale)
        return verbs.unscale(leaf, state)[0].astype(dtype)

    return jax.tree.map(unscale, tree)


def _is_float(leaf: Any) -> bool:
    """Whether a leaf is an array of real or complex floats."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _warn_unless_floating(name: str, value: Any) -> None:
    """Warn as jmp does of a scale that is no float."""
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        message = f"Expected floating type for {name}, got {dtype}"
        warnings.warn(message, UserWarning, stacklevel=4)


@functools.cache
def _policy(period: int, factor: float, floor: float) -> Dynamic:
    # The first scale is the caller's, and may lie below the floor.
    floor = max(floor, validation.SMALLEST_NORMAL)
    return presets.get(
        "jmp",
        init_scale=floor,
        growth_interval=period,
        growth_factor=factor,
        backoff_divisor=factor,
        min_scale=floor,
    )


trees.register(NoOpLossScale, ())
trees.register(StaticLossScale, ())
trees.register(DynamicLossScale, ("loss_scale", "counter"))
