# SPDX-License-Identifier: Apache-2.0
"""The state of `loss_scaled`, and how to find it in any nest of optimizer states.

The loss is scaled before the optimizer sees a gradient, so the caller has to read the
scale out of the optimizer's state: `scale_loss(loss, opt_state)`. It is an array of
the state that is passed in, under `jit` too; never close over a state.
"""

from typing import Any, NamedTuple

import jax

from lossscale.core.state import Array, ScaleState
from lossscale.errors import StateError
from lossscale.jax import verbs


class LossScaledState(NamedTuple):
    """What `loss_scaled` keeps from step to step.

    The three last fields are named and counted as `optax.apply_if_finite` does.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> optimizer = ls.loss_scaled(optax.sgd(0.1), lossscale.Fixed(8.0))
        >>> optimizer.init(jnp.ones(2)).total_notfinite
        Array(0, dtype=int32)
    """

    scale_state: ScaleState
    """The loss scale and its counters."""
    inner_state: Any
    """The state of the optimizer inside; a skipped step leaves it as it is."""
    last_finite: Array
    """Whether the last step was finite, and so was taken."""
    notfinite_count: Array
    """How many steps in a row were skipped up to now."""
    total_notfinite: Array
    """How many steps were skipped in all."""


def find_states(opt_state: Any) -> list[LossScaledState]:
    """Return every `LossScaledState` in a nest of optimizer states, in its order.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> optimizer = optax.chain(
        ...     ls.loss_scaled(optax.adam(0.1), lossscale.Fixed(8.0)),
        ...     optax.ema(0.9),
        ... )
        >>> len(ls.find_states(optimizer.init(jnp.ones(2))))
        1
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_state)
    return [node for node in nodes if _is_state(node)]


def scale_state(opt_state: Any) -> ScaleState:
    """Return the loss scale and its counters from a nest of optimizer states.

    Args:
        opt_state: What an optimizer's `init` or `update` returned, or a train state or
            an `nnx.Optimizer` that holds it.

    Raises:
        StateError: If it holds no loss scale, or more than one.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> policy = lossscale.Fixed(8.0)
        >>> optimizer = optax.chain(ls.loss_scaled(optax.adam(0.1), policy))
        >>> state = optimizer.init(jnp.ones(2))
        >>> lossscale.to_portable(policy, ls.scale_state(state))["state"]
        {'scale': 8.0, 'good_steps': 0, 'bad_steps': 0}
    """
    found = _the_one(opt_state).scale_state
    return ScaleState(*(_array(value) for value in found))


def get_scale(opt_state: Any) -> Array:
    """Return the current loss scale from a nest of optimizer states, a float32 array.

    Raises:
        StateError: If it holds no loss scale, or more than one.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> optimizer = ls.loss_scaled(optax.adam(0.1), lossscale.Fixed(8.0))
        >>> ls.get_scale(optimizer.init(jnp.ones(2)))
        Array(8., dtype=float32)
    """
    return scale_state(opt_state).scale


def scale_loss(loss: Any, opt_state: Any) -> Any:
    """Return the loss times the scale that the optimizer will divide by, in float32.

    Args:
        loss: The loss; a float16 one is widened first.
        opt_state: The state that goes into the optimizer's next `update`.

    Raises:
        StateError: If the state holds no loss scale, or more than one.
        GradientError: If the loss is not a floating-point number.

    Example:
        >>> import jax, jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> optimizer = ls.loss_scaled(optax.sgd(0.5), lossscale.Fixed(8.0))
        >>> params = jnp.float32(3.0)
        >>> state = optimizer.init(params)
        >>> loss = lambda params: ls.scale_loss(params**2, state)
        >>> updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        >>> optax.apply_updates(params, updates)
        Array(0., dtype=float32)
    """
    return verbs.scale(loss, scale_state(opt_state))


def with_scale_state(opt_state: Any, state: ScaleState) -> Any:
    """Return the same nest of optimizer states with another loss scale in it.

    The way to go on from a portable state or from another library's.

    Args:
        opt_state: A nest of optimizer states with one `LossScaledState` in it.
        state: What `lossscale.jax.init(policy, state)` returned.

    Raises:
        StateError: If it holds no loss scale, or more than one.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import lossscale, lossscale.jax, lossscale.optax as ls
        >>> policy = lossscale.Dynamic()
        >>> optimizer = ls.loss_scaled(optax.adam(0.1), policy)
        >>> saved = lossscale.ScaleState(scale=512.0, good_steps=7, bad_steps=0)
        >>> state = ls.with_scale_state(
        ...     optimizer.init(jnp.ones(2)), lossscale.jax.init(policy, saved)
        ... )
        >>> ls.get_scale(state)
        Array(512., dtype=float32)
    """
    _the_one(opt_state)

    def replace(node: Any) -> Any:
        return node._replace(scale_state=state) if _is_state(node) else node

    return jax.tree.map(replace, opt_state, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    return isinstance(node, LossScaledState)


def _the_one(opt_state: Any) -> LossScaledState:
    """Return the only `LossScaledState` of a nest."""
    found = find_states(opt_state)
    if len(found) == 1:
        return found[0]
    if found:
        message = (
            f"The optimizer state holds {len(found)} loss scales, expected one. Pick "
            "the one that belongs to the loss: find_states(opt_state)[i]."
        )
    else:
        message = (
            f"The {type(opt_state).__name__} holds no LossScaledState. Pass the state "
            "of an optimizer made by loss_scaled; a checkpoint read as plain "
            "dictionaries must be restored into one first."
        )
    raise StateError(message)


def _array(value: Any) -> Array:
    """Return an array, out of the variable that flax's nnx wraps it in."""
    return value.get_value() if hasattr(value, "get_value") else value
