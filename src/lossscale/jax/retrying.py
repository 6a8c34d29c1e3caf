# SPDX-License-Identifier: Apache-2.0
"""A bad step once more, on the same batch, at the scale to which it led.

An overflow costs a batch. Where batches are dear, the step is computed again at the
lower scale, a bounded number of times, inside `jit`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core import validation
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.jax.signatures import named_like
from lossscale.jax.value_and_grad import Differentiated


class Retried(NamedTuple):
    """A `Differentiated` of the last attempt, and how many there were after the first.

    Example:
        >>> import lossscale.jax as ls
        >>> ls.Retried._fields
        ('value', 'grads', 'signal', 'state', 'retries')
    """

    value: Any
    """What the function returned: the loss, or the pair of loss and the rest."""
    grads: Any
    """The unscaled gradients."""
    signal: Signal
    """What the last attempt saw; it may be bad still."""
    state: ScaleState
    """The state for the next step: every attempt has moved it."""
    retries: Array
    """How many attempts followed the first one."""


def retrying(
    step: Callable[..., Differentiated], *, retries: int = 3
) -> Callable[..., Retried]:
    """Return a step that is computed again at a lower scale while it is bad.

    It ends with a finite step, after `retries` attempts more, or where another attempt
    could not differ: the policy has not lowered the scale (it is at its floor, or waits
    for more overflows), or the loss itself was not finite.

    The step is compiled twice: once alone and once in a `lax.while_loop`, through which
    JAX cannot differentiate backwards. Draw no random numbers from a changing source in
    it: the second attempt is to see what the first one saw.

    Args:
        step: What `value_and_grad` returned.
        retries: How many attempts may follow the first one.

    Raises:
        SettingError: If `retries` is not at least 1.

    Example:
        >>> import jax, jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> policy = lossscale.Dynamic(init_scale=2.0**16)
        >>> def loss(weight):  # its gradient, 4, overflows above a scale of 2**13
        ...     return (4 * weight.astype(jnp.float16)).astype(jnp.float32)
        >>> step = jax.jit(ls.retrying(ls.value_and_grad(loss, policy), retries=5))
        >>> value, grads, signal, state, retries = step(ls.init(policy), jnp.float32(1))
        >>> float(grads), bool(signal.finite), float(state.scale), int(retries)
        (4.0, True, 8192.0, 3)
    """
    limit = validation.check_count("retries", retries)

    @named_like(step)
    def retried(state: ScaleState, /, *args: Any, **kwargs: Any) -> Retried:
        first = step(state, *args, **kwargs)

        def may_differ(carry: tuple[Array, Array, Differentiated]) -> Array:
            attempts, before, found = carry
            signal = found.signal
            useful = ~signal.finite & (found.state.scale < before)
            if signal.loss_finite is not None:
                useful &= signal.loss_finite
            return useful & (attempts < limit)

        def again(
            carry: tuple[Array, Array, Differentiated],
        ) -> tuple[Array, Array, Differentiated]:
            attempts, _, found = carry
            return attempts + 1, found.state.scale, step(found.state, *args, **kwargs)

        # Zeros of the next scale vary along the axes of a shard_map as it does.
        zero = jnp.zeros_like(first.state.scale)
        start = jnp.asarray(state.scale, jnp.float32) + zero
        carry = (jnp.zeros_like(zero, jnp.int32), start, first)
        attempts, _, last = jax.lax.while_loop(may_differ, again, carry)
        return Retried(last.value, last.grads, last.signal, last.state, attempts)

    return retried
