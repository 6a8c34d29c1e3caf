# SPDX-License-Identifier: Apache-2.0
"""flax's `DynamicScale`, with its fields, its `replace` and its `value_and_grad`.

It takes the steps of the original, growth one step late included. Its arrays are
arrays from the start, so nothing is compiled twice, and the loss that it returns is
the one that was computed, not one that overflowed when it was scaled.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lossscale import presets
from lossscale.core import validation
from lossscale.core.policies import Dynamic
from lossscale.core.state import Array, Signal
from lossscale.jax import verbs
from lossscale.jax.drop_ins import trees
from lossscale.jax.drop_ins.like_jmp import all_finite


class DynamicScaleResult(NamedTuple):
    """What flax's `DynamicScale.value_and_grad` returns.

    Example:
        >>> from lossscale.jax.drop_ins import DynamicScaleResult
        >>> DynamicScaleResult._fields
        ('dynamic_scale', 'finite', 'aux', 'grad')
    """

    dynamic_scale: "DynamicScale"
    """The scale to use for the next step."""
    finite: Array
    """Whether all gradients are finite; if not, leave the step out."""
    aux: Any
    """The loss, unscaled; with `has_aux`, the loss and the rest."""
    grad: Any
    """The unscaled gradients, in float32."""


@dataclass(frozen=True)
class DynamicScale:
    """flax's dynamic scale: two leaves, `fin_steps` and `scale`.

    It grows where flax's does, one step later than `growth_interval` says.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.drop_ins import DynamicScale
        >>> square = lambda x: x.astype(jnp.float16) ** 2
        >>> scaler = DynamicScale(scale=1024.0)
        >>> result = scaler.value_and_grad(square)(jnp.float32(1.0))
        >>> result.aux, result.grad, result.dynamic_scale.scale
        (Array(1., dtype=float32), Array(2., dtype=float32), Array(1024., dtype=float32))
    """  # noqa: E501

    growth_factor: float = 2.0
    """What growth multiplies by."""
    backoff_factor: float = 0.5
    """What back-off multiplies by."""
    growth_interval: int = 2000
    """After how many clean steps in a row the next one makes the scale grow."""
    fin_steps: Any = 0
    """Clean steps counted towards the next growth."""
    scale: Any = 65536.0
    """The scale; kept in float32 whatever it comes in."""
    minimum_scale: Any = validation.SMALLEST_NORMAL
    """The floor; `None` and anything below 2**-126 count as that."""

    def __post_init__(self) -> None:
        """Keep arrays in their one dtype, and check the settings."""
        floor = self.minimum_scale
        values = {
            "growth_factor": trees.number(self.growth_factor),
            "backoff_factor": trees.number(self.backoff_factor),
            "growth_interval": trees.number(self.growth_interval),
            "fin_steps": jnp.asarray(self.fin_steps, jnp.int32),
            "scale": jnp.asarray(self.scale, jnp.float32),
            "minimum_scale": None if floor is None else float(trees.number(floor)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._policy()
        trees.tell_flax(DynamicScale)

    def replace(self, **changes: Any) -> "DynamicScale":
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: Any = None,
    ) -> Callable[..., DynamicScaleResult]:
        """Return a function of the loss, its gradients and the next scale.

        Args:
            fun: The loss function; with `has_aux` it returns a pair.
            argnums: Which arguments to differentiate by.
            has_aux: Whether `fun` returns the loss and something else.
            axis_name: Axes over which the unscaled gradients are averaged before they
                are looked at.
        """
        state = trees.state(self.scale, self.fin_steps)

        @functools.wraps(fun)
        def scaled(*args: Any, **kwargs: Any) -> tuple[Array, tuple[Array, Any]]:
            result = fun(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            return verbs.scale(loss, state), (loss, aux)

        differentiated = jax.value_and_grad(scaled, argnums, has_aux=True)

        def value_and_grad(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            (_, (loss, aux)), scaled_grads = differentiated(*args, **kwargs)
            # The loss as it came, not one that overflowed when it was scaled.
            loss = verbs.scale(loss, trees.state(1.0, 0))
            grad = verbs.unscale(scaled_grads, state)[0]
            if axis_name is not None:
                grad = jax.lax.pmean(grad, axis_name)
            finite = all_finite(grad)
            after = verbs.update(self._policy(), state, Signal(finite))
            return DynamicScaleResult(
                dynamic_scale=self.replace(
                    fin_steps=after.good_steps, scale=after.scale
                ),
                finite=finite,
                aux=(loss, aux) if has_aux else loss,
                grad=grad,
            )

        return value_and_grad

    def _policy(self) -> Dynamic:
        return _policy(
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            self.minimum_scale or 0.0,
        )


@functools.cache
def _policy(growth: float, backoff: float, interval: int, floor: float) -> Dynamic:
    # The first scale is the caller's, and may lie below the floor.
    floor = max(floor, validation.SMALLEST_NORMAL)
    return presets.get(
        "flax",
        init_scale=floor,
        growth_interval=interval,
        growth_factor=growth,
        backoff_factor=backoff,
        min_scale=floor,
    )


trees.register(DynamicScale, ("fin_steps", "scale"))
