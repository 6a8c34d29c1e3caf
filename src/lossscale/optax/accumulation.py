# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation around `loss_scaled`, where one overflow skips the whole step.

There are two ways to accumulate, and they differ in what an overflow costs:

    loss_scaled(optax.MultiSteps(inner, k).gradient_transformation(), policy)
        checks every micro-batch: one that overflowed is left out, and the scale is
        updated at once.
    MultiSteps(loss_scaled(inner, policy), k)
        checks the sum of k: one overflow costs all of them, and the scale is updated
        once in k micro-batches.

The second needs the class below: optax's own resets its sum by multiplying it by 0, and
infinity times 0 is NaN, which stays.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lossscale.core import validation
from lossscale.optax.parameters import check_optimizer


class MultiSteps(optax.MultiSteps):  # type: ignore[misc]
    """`optax.MultiSteps` whose sum is reset to zero, whatever its value was.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> policy = lossscale.Dynamic(init_scale=4.0)
        >>> optimizer = ls.MultiSteps(ls.loss_scaled(optax.sgd(1.0), policy), 2)
        >>> params = jnp.float32(0.0)
        >>> state = optimizer.init(params)
        >>> for scaled in (jnp.inf, 4.0, 2.0, 2.0):
        ...     updates, state = optimizer.update(jnp.float32(scaled), state, params)
        >>> updates, ls.get_scale(state)
        (Array(-1., dtype=float32), Array(2., dtype=float32))
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[jax.Array], jax.Array],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Wrap an optimizer.

        Args:
            opt: What `loss_scaled` returned.
            every_k_schedule: How many micro-batches make a step: a number, or a
                function of the step.
            *args: Further arguments of `optax.MultiSteps`.
            **kwargs: The same, by name.

        Raises:
            SettingTypeError: If `opt` is no optimizer, or `every_k_schedule` neither a
                whole number nor a function.
            SettingError: If `every_k_schedule` is not at least 1.
        """
        check_optimizer("opt", opt)
        if not callable(every_k_schedule):
            every_k_schedule = validation.check_count(
                "every_k_schedule", every_k_schedule, "micro-batches"
            )
        super().__init__(opt, every_k_schedule, *args, **kwargs)

    def update(
        self,
        updates: optax.Updates,
        state: optax.MultiStepsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        """Add a micro-batch; apply the step with the last of k."""
        new_updates, new_state = super().update(updates, state, params, **extra_args)
        # Also if should_skip_update_fn left out the first micro-batch: the sum is 0.
        is_first = new_state.mini_step == 0
        sums = jax.tree.map(
            lambda leaf: jnp.where(is_first, jnp.zeros_like(leaf), leaf),
            new_state.acc_grads,
        )
        return new_updates, new_state._replace(acc_grads=sums)
