# SPDX-License-Identifier: Apache-2.0
"""jmp's loss scales: three kinds with `scale`, `unscale` and `adjust`; two functions.

Each takes the steps of the original. Its floor survives `jit` here: settings are
static. A scale in float16, as jmp's own introduction has it, is kept in float32.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from lossscale import presets
from lossscale.core import validation
from lossscale.core.policies import Dynamic
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.jax import verbs
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
    """The scale, kept as a Python number."""

    def __post_init__(self) -> None:
        """Check the scale."""
        value = validation.check_scale("loss_scale", trees.number(self.loss_scale))
        object.__setattr__(self, "loss_scale", value)

    def scale(self, tree: Any) -> Any:
        """Return the tree times the scale, in float32."""
        return verbs.scale(tree, self._state())

    def unscale(self, tree: Any) -> Any:
        """Return the tree divided by the scale, in float32."""
        return verbs.unscale(tree, self._state())[0]

    def adjust(self, grads_finite: Array) -> "StaticLossScale":
        """Return the same scale."""
        del grads_finite
        return self

    def _state(self) -> ScaleState:
        return trees.state(self.loss_scale, 0)


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
    """The scale; kept in float32 whatever it comes in."""
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
        period, floor = (
            trees.number(self.period),
            float(trees.number(self.min_loss_scale)),
        )
        values = {
            "loss_scale": jnp.asarray(self.loss_scale, jnp.float32),
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
        """Return the tree times the scale, in float32."""
        return verbs.scale(tree, self._state())

    def unscale(self, tree: Any) -> Any:
        """Return the tree divided by the scale, in float32."""
        return verbs.unscale(tree, self._state())[0]

    def adjust(self, grads_finite: Array) -> "DynamicLossScale":
        """Return the scale after a step.

        Args:
            grads_finite: Whether all gradients were finite, as `all_finite` says.
        """
        after = verbs.update(self._policy(), self._state(), Signal(grads_finite))
        return replace(self, loss_scale=after.scale, counter=after.good_steps)

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
    finite = jnp.asarray(True)
    for leaf in jax.tree.leaves(tree):
        finite &= jnp.all(jnp.isfinite(leaf))
    return finite


def select_tree(pred: Array, a: Any, b: Any) -> Any:
    """Return `a` where the predicate is true, else `b`; jmp's name for `select`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.drop_ins import select_tree
        >>> select_tree(jnp.array(False), jnp.int32(7), jnp.int32(6))
        Array(6, dtype=int32)
    """
    return verbs.select(pred, a, b)


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
