# SPDX-License-Identifier: Apache-2.0
"""jmp's three loss scales, with `scale`, `unscale` and `adjust`, and two functions.

Each computes the same steps as the original. The minimum survives `jit` here: settings
are static. Dtypes are jmp's: float16 gradients stay float16 with a scale in float16, as
in jmp's own introduction, or with a Python number, and become float32 with a scale in
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
from lossscale.core.state import Array, Signal
from lossscale.core.validation import format_value
from lossscale.errors import GradientError
from lossscale.jax import functional, gradient, selection
from lossscale.jax.compat import pytree
from lossscale.jax.types import PyTree

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "StaticLossScale",
    "all_finite",
    "select_tree",
]


@dataclass(frozen=True)
class NoOpLossScale:
    """jmp's scale of 1, which does nothing.

    Example:
        >>> from lossscale.jax.compat.jmp import NoOpLossScale
        >>> NoOpLossScale().scale({"loss": 3.0})
        {'loss': 3.0}
    """

    @property
    def loss_scale(self) -> int:
        """The scale: 1."""
        return 1

    def scale(self, tree: PyTree) -> PyTree:
        """Return the tree unchanged."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Return the tree unchanged."""
        return tree

    def adjust(self, grads_finite: Array) -> "NoOpLossScale":
        """Return the same scale."""
        del grads_finite
        return self


@dataclass(frozen=True)
class StaticLossScale:
    """jmp's constant scale; a constant of the compiled function.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.compat.jmp import StaticLossScale
        >>> StaticLossScale(2**15).scale(jnp.float16(4.0))
        Array(131072., dtype=float32)
    """

    loss_scale: Array
    """The scale: a Python number, or a NumPy scalar if an array was passed."""

    def __post_init__(self) -> None:
        """Validate the scale, unless it is being traced."""
        if isinstance(self.loss_scale, jax.core.Tracer):
            return
        validation.check_scale("loss_scale", pytree.to_python_number(self.loss_scale))
        if isinstance(self.loss_scale, (jax.Array, np.ndarray)):
            object.__setattr__(self, "loss_scale", np.asarray(self.loss_scale)[()])

    def scale(self, tree: PyTree) -> PyTree:
        """Return the tree times the scale; floats in float32."""
        return _scale(tree, self.loss_scale)

    def unscale(self, tree: PyTree) -> PyTree:
        """Return the tree divided by the scale, in jmp's dtypes."""
        return _unscale(tree, self.loss_scale)

    def adjust(self, grads_finite: Array) -> "StaticLossScale":
        """Return the same scale."""
        del grads_finite
        return self


@dataclass(frozen=True)
class DynamicLossScale:
    """jmp's dynamic scale: two leaves, `loss_scale` and `counter`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.compat.jmp import DynamicLossScale
        >>> scale = DynamicLossScale(jnp.float32(2.0**15), min_loss_scale=0.5)
        >>> scale.adjust(jnp.array(False)).loss_scale
        Array(16384., dtype=float32)
    """

    loss_scale: Array
    """The scale; float16 and bfloat16 stay, other dtypes are converted to float32."""
    counter: Array = 0
    """Finite steps counted towards the next growth."""
    period: int = 2000
    """After how many finite steps in a row the scale grows."""
    factor: float = 2
    """Growth multiplies by it, and back-off divides by it."""
    min_loss_scale: float = 1.0
    """The minimum, stored as a Python number. Below 2**-126 it counts as that."""

    def __post_init__(self) -> None:
        """Convert arrays to their dtypes, and validate the settings."""
        _warn_unless_floating("loss_scale", self.loss_scale)
        _warn_unless_floating("min_loss_scale", self.min_loss_scale)
        period = pytree.to_python_number(self.period)
        dtype = getattr(self.loss_scale, "dtype", None)
        is_narrow = str(dtype) in headroom.NARROW
        values = {
            "loss_scale": jnp.asarray(
                self.loss_scale, dtype if is_narrow else "float32"
            ),
            "counter": jnp.asarray(self.counter, jnp.int32),
            "period": int(period) if period == int(period) else period,
            "factor": pytree.to_python_number(self.factor),
            "min_loss_scale": float(pytree.to_python_number(self.min_loss_scale)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._make_policy()
        pytree.register_with_flax(DynamicLossScale)

    def scale(self, tree: PyTree) -> PyTree:
        """Return the tree times the scale; floats in float32."""
        return _scale(tree, self.loss_scale)

    def unscale(self, tree: PyTree) -> PyTree:
        """Return the tree divided by the scale, in jmp's dtypes."""
        return _unscale(tree, self.loss_scale)

    def adjust(self, grads_finite: Array) -> "DynamicLossScale":
        """Return the scale after a step.

        Args:
            grads_finite: Whether all gradients were finite: `all_finite(grads)`.
        """
        state = pytree.make_state(self.loss_scale, self.counter)
        next_state = functional.update(self._make_policy(), state, Signal(grads_finite))
        next_scale = next_state.scale.astype(self.loss_scale.dtype)
        # A float16 scale stays where it is if the next one would leave its dtype.
        is_usable = jnp.isfinite(next_scale) & (next_scale > 0)
        scale = jnp.where(is_usable, next_scale, self.loss_scale)
        return replace(self, loss_scale=scale, counter=next_state.good_steps)

    def _make_policy(self) -> Dynamic:
        return _make_policy(self.period, self.factor, self.min_loss_scale)


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale
"""Any of jmp's three loss scales."""


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether every leaf is finite, as one boolean; True without leaves.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.compat.jmp import all_finite
        >>> all_finite({"w": jnp.array([1.0, jnp.inf]), "b": None})
        Array(False, dtype=bool)
    """
    flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return gradient.all_true(flags)


def select_tree(pred: Array, a: PyTree, b: PyTree) -> PyTree:
    """Return `a` if the predicate is true, else `b`, including infinities and NaN.

    Raises:
        GradientError: If `pred` is not one boolean; it is an AssertionError too.
        StructureError: If the two do not have the same structure, shapes and dtypes.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.compat.jmp import select_tree
        >>> select_tree(jnp.array(False), jnp.int32(7), jnp.int32(6))
        Array(6, dtype=int32)
    """
    if jnp.shape(pred) != () or jnp.result_type(pred) != jnp.bool_:
        message = f"pred is {format_value(pred)}, expected boolean scalar."
        raise _PredicateError(message)
    selection.check_same_structure(a, b)
    return selection.select_leaves(jnp.asarray(pred), a, b, finite_only=False)


class _PredicateError(GradientError, AssertionError):
    """jmp raises an AssertionError here."""


def _scale(tree: PyTree, loss_scale: Array) -> PyTree:
    """Return a tree times a scale: floats in float32, the rest by JAX's promotion."""
    state = pytree.make_state(loss_scale, 0)

    def scale(leaf: Any) -> Any:
        return functional.scale(leaf, state) if _is_float(leaf) else leaf * loss_scale

    return jax.tree.map(scale, tree)


def _unscale(tree: PyTree, loss_scale: Array) -> PyTree:
    """Return a tree divided by a scale: computed in float32, in the dtypes of jmp."""
    state = pytree.make_state(loss_scale, 0)

    def unscale(leaf: Any) -> Any:
        if not _is_float(leaf):
            return leaf * (1 / loss_scale)
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(leaf, loss_scale)
        return functional.unscale(leaf, state)[0].astype(dtype)

    return jax.tree.map(unscale, tree)


def _is_float(leaf: object) -> bool:
    """Whether a leaf is an array of real or complex floats."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def _warn_unless_floating(name: str, value: Array) -> None:
    """Warn, as jmp does, if a scale is no float."""
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        message = f"Expected floating type for {name}, got {dtype}"
        warnings.warn(message, UserWarning, stacklevel=4)


@functools.cache
def _make_policy(period: int, factor: float, minimum: float) -> Dynamic:
    # The caller provides the first scale, which may be below the minimum.
    minimum = max(minimum, validation.SMALLEST_NORMAL)
    return presets.get(
        "jmp",
        init_scale=minimum,
        growth_interval=period,
        growth_factor=factor,
        backoff_divisor=factor,
        min_scale=minimum,
    )


pytree.register_pytree(NoOpLossScale, ())
pytree.register_pytree(StaticLossScale, ())
pytree.register_pytree(DynamicLossScale, ("loss_scale", "counter"))
