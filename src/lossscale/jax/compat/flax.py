# SPDX-License-Identifier: Apache-2.0
"""flax's `DynamicScale`, with its fields, its `replace` and its `value_and_grad`.

It computes the same steps as the original, including growth one step late. Its fields
are arrays from the start, so nothing is compiled twice, and it returns the loss that
was computed, not one that overflowed when it was scaled.
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
from lossscale.core.state import Array
from lossscale.jax import functional
from lossscale.jax.compat import pytree
from lossscale.jax.types import AxisName, PyTree

__all__ = ["DynamicScale", "DynamicScaleResult"]


class DynamicScaleResult(NamedTuple):
    """The result of a function that `DynamicScale.value_and_grad` returned.

    Example:
        >>> from lossscale.jax.compat.flax import DynamicScaleResult
        >>> DynamicScaleResult._fields
        ('dynamic_scale', 'finite', 'aux', 'grad')
    """

    dynamic_scale: "DynamicScale"
    """The scale to use for the next step."""
    finite: jax.Array
    """Whether all gradients are finite and can be squared; if not, skip the step."""
    aux: PyTree
    """The unscaled loss; with `has_aux`, the loss and the auxiliary data."""
    grad: PyTree
    """The unscaled gradients, in float32."""


@dataclass(frozen=True)
class DynamicScale:
    """flax's dynamic scale: two leaves, `fin_steps` and `scale`.

    Like flax's, it grows one step later than `growth_interval` says.

    Example:
        >>> import jax.numpy as jnp
        >>> from lossscale.jax.compat.flax import DynamicScale
        >>> square = lambda x: x.astype(jnp.float16) ** 2
        >>> scaler = DynamicScale(scale=1024.0)
        >>> result = scaler.value_and_grad(square)(jnp.float32(1.0))
        >>> result.aux, result.grad, result.dynamic_scale.scale
        (Array(1., dtype=float32), Array(2., dtype=float32), Array(1024., dtype=float32))
    """  # noqa: E501

    growth_factor: float = 2.0
    """The factor of a growth."""
    backoff_factor: float = 0.5
    """The factor of a back-off."""
    growth_interval: int = 2000
    """After how many finite steps in a row the next one grows the scale."""
    fin_steps: Array = 0
    """Finite steps counted towards the next growth."""
    scale: Array = 65536.0
    """The scale, converted to float32."""
    minimum_scale: float | None = validation.SMALLEST_NORMAL
    """The minimum; `None` and anything below 2**-126 count as that."""

    def __post_init__(self) -> None:
        """Convert arrays to their dtypes, and validate the settings."""
        minimum = self.minimum_scale
        values = {
            "growth_factor": pytree.to_python_number(self.growth_factor),
            "backoff_factor": pytree.to_python_number(self.backoff_factor),
            "growth_interval": pytree.to_python_number(self.growth_interval),
            "fin_steps": jnp.asarray(self.fin_steps, jnp.int32),
            "scale": jnp.asarray(self.scale, jnp.float32),
            "minimum_scale": (
                None if minimum is None else float(pytree.to_python_number(minimum))
            ),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._make_policy()
        pytree.register_with_flax(DynamicScale)

    def replace(self, **changes: Any) -> "DynamicScale":
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisName = None,
    ) -> Callable[..., DynamicScaleResult]:
        """Return a function that computes the loss, its gradients and the next scale.

        Args:
            fun: The loss function; with `has_aux` it returns a pair.
            argnums: Which arguments to differentiate.
            has_aux: Whether `fun` returns the loss and auxiliary data.
            axis_name: Axes over which the unscaled gradients are averaged before they
                are checked.
        """
        state = pytree.make_state(self.scale, self.fin_steps)

        @functools.wraps(fun)
        def compute_scaled_loss(
            *args: Any, **kwargs: Any
        ) -> tuple[jax.Array, tuple[Array, PyTree]]:
            result = fun(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            return functional.scale(loss, state), (loss, aux)

        differentiate = jax.value_and_grad(compute_scaled_loss, argnums, has_aux=True)

        def value_and_grad(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            (_, (loss, aux)), scaled_grads = differentiate(*args, **kwargs)
            # The computed loss, not one that overflowed when it was scaled.
            loss = functional.scale(loss, pytree.make_state(1.0, 0))
            grad, signal = functional.unscale(scaled_grads, state)
            if axis_name is not None:
                grad = jax.lax.pmean(grad, axis_name)
                signal = functional.make_signal(jax.tree.leaves(grad))
            next_state = functional.update(self._make_policy(), state, signal)
            return DynamicScaleResult(
                dynamic_scale=self.replace(
                    fin_steps=next_state.good_steps, scale=next_state.scale
                ),
                finite=signal.finite,
                aux=(loss, aux) if has_aux else loss,
                grad=grad,
            )

        return value_and_grad

    def _make_policy(self) -> Dynamic:
        return _make_policy(
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            self.minimum_scale or 0.0,
        )


@functools.cache
def _make_policy(
    growth: float, backoff: float, interval: int, minimum: float
) -> Dynamic:
    # The caller provides the first scale, which may be below the minimum.
    minimum = max(minimum, validation.SMALLEST_NORMAL)
    return presets.get(
        "flax",
        init_scale=minimum,
        growth_interval=interval,
        growth_factor=growth,
        backoff_factor=backoff,
        min_scale=minimum,
    )


pytree.register_pytree(DynamicScale, ("fin_steps", "scale"))
