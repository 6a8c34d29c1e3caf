# SPDX-License-Identifier: Apache-2.0
"""Retry a step that overflowed on the same batch, at the lowered scale.

An overflow costs a batch. Where batches are expensive, the step is computed again at
the lowered scale, a bounded number of times, inside `jit`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core import validation
from lossscale.core.state import ScaleState, Signal
from lossscale.jax.arguments import check_function
from lossscale.jax.function_names import copy_name
from lossscale.jax.selection import select_leaves
from lossscale.jax.types import PyTree
from lossscale.jax.value_and_grad import ValueAndGrad


class RetryResult(NamedTuple):
    """The `ValueAndGrad` of the last attempt, and the number of retries.

    Example:
        >>> import lossscale.jax as ls
        >>> ls.RetryResult._fields
        ('value', 'grads', 'signal', 'state', 'retries')
    """

    value: PyTree
    """What the function returned: the loss, or the pair of loss and auxiliary data."""
    grads: PyTree
    """The unscaled gradients."""
    signal: Signal
    """The signal of the last attempt, which may still be an overflow."""
    state: ScaleState
    """The state for the next step. Every attempt has updated it, unless no scale
    helps."""
    retries: jax.Array
    """How many attempts followed the first one."""


def with_retries(
    step: Callable[..., ValueAndGrad], *, retries: int = 3
) -> Callable[..., RetryResult]:
    """Return a step that is computed again at a lower scale while it overflows.

    It ends with a finite step, after `retries` further attempts, or where another
    attempt could not differ: the policy has not lowered the scale (it is at its
    minimum, or waits for more overflows), or the loss itself was not finite. If all
    attempts overflow, one more at a scale of 2**-126 shows whether any scale would
    help: if not, as with the gradient of a square root at 0, the step counts as one
    overflow.

    The step is compiled twice: once alone and once in a `lax.while_loop`, through which
    JAX cannot differentiate backwards. The step must not draw random numbers from a
    source that changes: every attempt must compute the same loss.

    Args:
        step: What `value_and_grad` returned.
        retries: How many attempts may follow the first one.

    Raises:
        SettingError: If `retries` is not at least 1.
        SettingTypeError: If `step` is not a function.

    Example:
        >>> import jax, jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> policy = lossscale.Dynamic(init_scale=2.0**16)
        >>> def loss(weight):  # its gradient, 4, overflows above a scale of 2**13
        ...     return (4 * weight.astype(jnp.float16)).astype(jnp.float32)
        >>> step = jax.jit(ls.with_retries(ls.value_and_grad(loss, policy), retries=5))
        >>> value, grads, signal, state, retries = step(ls.init(policy), jnp.float32(1))
        >>> float(grads), bool(signal.finite), float(state.scale), int(retries)
        (4.0, True, 8192.0, 3)
    """
    check_function("step", step, "what value_and_grad(fun, policy) returned")
    limit = validation.check_count("retries", retries, "retries")

    @copy_name(step)
    def step_with_retries(
        state: ScaleState, /, *args: Any, **kwargs: Any
    ) -> RetryResult:
        first = step(state, *args, **kwargs)

        def can_retry(carry: _Carry) -> jax.Array:
            signal = carry.result.signal
            useful: jax.Array = ~signal.finite & (
                carry.result.state.scale < carry.scale
            )
            if signal.loss_finite is not None:
                useful &= signal.loss_finite
            return useful & (carry.attempts <= limit)

        def retry(carry: _Carry) -> _Carry:
            attempts, last_scale, last, _ = carry
            is_probe = attempts == limit
            lowest = jnp.full_like(last_scale, validation.SMALLEST_NORMAL)
            scale = jnp.where(is_probe, lowest, last.state.scale)
            new = step(last.state._replace(scale=scale), *args, **kwargs)
            return _Carry(
                attempts + 1,
                jnp.where(is_probe, last_scale, last.state.scale),
                select_leaves(~is_probe, new, last, finite_only=False),
                is_probe & ~new.signal.finite,
            )

        # Zeros made from the next scale vary along the axes of a shard_map as it does.
        zero = jnp.zeros_like(first.state.scale)
        scale = jnp.asarray(state.scale, jnp.float32) + zero
        count = jnp.zeros_like(zero, jnp.int32)
        carry = _Carry(count, scale, first, count > 0)
        attempts, _, last, is_hopeless = jax.lax.while_loop(can_retry, retry, carry)
        return RetryResult(
            last.value,
            last.grads,
            last.signal,
            select_leaves(is_hopeless, first.state, last.state, finite_only=False),
            jnp.minimum(attempts, limit),
        )

    return step_with_retries


class _Carry(NamedTuple):
    """The carry of the loop over attempts."""

    attempts: jax.Array
    """How many followed the first; the attempt after the last allowed one probes."""
    scale: jax.Array
    """The scale of the last attempt."""
    result: ValueAndGrad
    """The result of the last attempt."""
    is_hopeless: jax.Array
    """Whether the gradients are not finite at the lowest scale either."""
