# SPDX-License-Identifier: Apache-2.0
"""Values of an evaluation: what each has that is not finite, and what it was made of."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core.explanation.origins import Origin
from lossscale.jax.explanation.places import Place


class Kind(NamedTuple):
    """What an array has that is not finite."""

    nan: bool
    plus: bool
    """Whether it has +inf."""
    minus: bool
    """Whether it has -inf."""

    @property
    def is_mask(self) -> bool:
        """Whether it has -inf only, as the masks of attention have on purpose."""
        return self.minus and not self.plus and not self.nan


def kind_of(array: Any) -> Kind | None:
    """Return what an array has that is not finite; `None` if it is finite.

    Waits for the device.
    """
    dtype = jnp.result_type(array) if not hasattr(array, "dtype") else array.dtype
    if not jnp.issubdtype(dtype, jnp.inexact) or not jnp.size(array):
        return None
    flags = Kind(*(bool(flag) for flag in jax.device_get(_find_flags(array))))
    return flags if any(flags) else None


@jax.jit
def _find_flags(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        infinite = jnp.isinf(array).any()
        return jnp.isnan(array).any(), infinite, jnp.zeros((), bool)
    return (
        jnp.isnan(array).any(),
        jnp.isposinf(array).any(),
        jnp.isneginf(array).any(),
    )


@dataclass(eq=False)
class Node:
    """One evaluated equation, or an argument."""

    index: int
    """Its position in the order of evaluation."""
    place: Place
    operation: str | None = None
    parents: "tuple[Node, ...]" = ()
    """What made its inputs."""
    bad_parents: "tuple[Node, ...]" = ()
    """What made those of its inputs that were not finite."""
    kind: Kind | None = None
    """What its result has that is not finite."""
    dtype: str | None = None
    origin: Origin | None = None
    """What the equation did, where the result is worse than what it read."""
    magnitude: float | None = None
    argument: str | None = None
    """The name of the argument, if it is one."""
    is_parameter: bool = False
    forward: bool = field(default=False)
    """Whether the loss depends on it."""


class Value(NamedTuple):
    """An array, what made it, and what it has that is not finite."""

    array: Any
    node: Node | None = None
    """`None` for a literal."""
    kind: Kind | None = None
