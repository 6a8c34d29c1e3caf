# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation around `loss_scaled`, where one overflow skips the whole step.

There are two ways to accumulate, and they differ in what an overflow costs:

    loss_scaled(optax.MultiSteps(inner, k).gradient_transformation(), policy)
        looks at every micro-batch: a bad one is left out, and the scale moves at once.
    MultiSteps(loss_scaled(inner, policy), k)
        looks at the sum of k: a bad micro-batch costs all of them, and the scale
        moves once in k.

The second needs the class below: optax's own clears its sum by multiplying it with 0,
which leaves NaN of an infinity, for ever.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


class MultiSteps(optax.MultiSteps):  # type: ignore[misc]
    """`optax.MultiSteps` whose sum starts from zero again, whatever was in it.

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

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        """Add up a micro-batch; take the step with the last one of k."""
        moved, after = super().update(updates, state, params, **extra_args)
        # A micro-batch that should_skip_update_fn left out at 0 finds zeros there.
        starts = after.mini_step == 0
        sums = jax.tree.map(
            lambda leaf: jnp.where(starts, jnp.zeros_like(leaf), leaf), after.acc_grads
        )
        return moved, after._replace(acc_grads=sums)
