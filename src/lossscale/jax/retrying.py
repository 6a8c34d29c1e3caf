# SPDX-License-Identifier: Apache-2.0
"""Retry a step that overflowed on the same batch, at the lower scale.

An overflow costs a batch. Where batches are dear, the step is computed again at the
lower scale, a bounded number of times, inside `jit`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core import validation
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.jax.selecting import choose
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
    """The state for the next step: every attempt has moved it, unless none could
    help."""
    retries: Array
    """How many attempts followed the first one."""


def retrying(
    step: Callable[..., Differentiated], *, retries: int = 3
) -> Callable[..., Retried]:
    """Return a step that is computed again at a lower scale while it is bad.

    It ends with a finite step, after `retries` attempts more, or where another attempt
    could not differ: the policy has not lowered the scale (it is at its floor, or waits
    for more overflows), or the loss itself was not finite. If all attempts overflow,
    one more at a scale of 2**-126 tells whether any scale would do: if not, as with the
    gradient of a square root at 0, the step counts as one overflow.

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

        def is_useful(carry: _Carry) -> Array:
            signal = carry.found.signal
            useful = ~signal.finite & (carry.found.state.scale < carry.before)
            if signal.loss_finite is not None:
                useful &= signal.loss_finite
            return useful & (carry.attempts <= limit)

        def again(carry: _Carry) -> _Carry:
            attempts, before, found, _ = carry
            probes = attempts == limit
            lowest = jnp.full_like(before, validation.SMALLEST_NORMAL)
            scale = jnp.where(probes, lowest, found.state.scale)
            new = step(found.state._replace(scale=scale), *args, **kwargs)
            kept = choose(~probes, new, found, finite_only=False)
            return _Carry(
                attempts + 1,
                jnp.where(probes, before, found.state.scale),
                kept,
                probes & ~new.signal.finite,
            )

        # Zeros of the next scale vary along the axes of a shard_map as it does.
        zero = jnp.zeros_like(first.state.scale)
        start = jnp.asarray(state.scale, jnp.float32) + zero
        count = jnp.zeros_like(zero, jnp.int32)
        carry = _Carry(count, start, first, count > 0)
        attempts, _, last, hopeless = jax.lax.while_loop(is_useful, again, carry)
        return Retried(
            last.value,
            last.grads,
            last.signal,
            choose(hopeless, first.state, last.state, finite_only=False),
            jnp.minimum(attempts, limit),
        )

    return retried


class _Carry(NamedTuple):
    """What goes from attempt to attempt."""

    attempts: Array
    """How many were made after the first; the one after the last allowed probes."""
    before: Array
    """The scale of the last attempt."""
    found: Differentiated
    """What it found."""
    hopeless: Array
    """Whether the gradients are not finite at the lowest scale either."""
