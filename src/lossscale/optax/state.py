# SPDX-License-Identifier: Apache-2.0
"""The state of `loss_scaled`, and functions that find it in nested optimizer states.

The loss is scaled before the optimizer receives a gradient, so the caller reads the
scale from the optimizer's state: `scale_loss(loss, opt_state)`. The scale is an array
of the state that is passed in, also under `jit`; never close over a state.
"""

from typing import Any, NamedTuple, TypeVar

import jax

from lossscale.core.state import ScaleState, is_state
from lossscale.core.validation import describe_type, name_type
from lossscale.errors import StateError
from lossscale.jax import functional
from lossscale.jax.export import register_tuple
from lossscale.jax.types import PyTree

State = TypeVar("State")


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`.

    `last_finite` and the two counts have the names of `optax.apply_if_finite`. Fields
    of the inner state can be read as attributes of this one, as functions of optax do:
    `optax.contrib.schedule_free_eval_params(opt_state, params)`.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> optimizer = ls.loss_scaled(optax.sgd(0.1), lossscale.Fixed(8.0))
        >>> optimizer.init(jnp.ones(2)).total_notfinite
        Array(0, dtype=int32)
    """

    scale_state: ScaleState
    """The loss scale and its counters."""
    inner_state: PyTree
    """The state of the wrapped optimizer; a skipped step does not change it."""
    last_finite: jax.Array
    """Whether the last step was applied."""
    last_too_large: jax.Array
    """Whether it was skipped because a finite gradient cannot be squared. The scale
    stays then: a lower scale does not make an unscaled gradient smaller."""
    notfinite_count: jax.Array
    """How many steps in a row have been skipped."""
    total_notfinite: jax.Array
    """How many steps have been skipped in total."""

    def __getattr__(self, name: str) -> Any:
        """Return a field of the inner state, if that is a NamedTuple which has it."""
        if name in getattr(self.inner_state, "_fields", ()):
            return getattr(self.inner_state, name)
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(message)


register_tuple(LossScaledState)


def find_states(opt_state: PyTree) -> list[LossScaledState]:
    """Return every `LossScaledState` in nested optimizer states, in tree order.

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


def get_scale_state(opt_state: PyTree) -> ScaleState:
    """Return the loss scale and its counters from nested optimizer states.

    Args:
        opt_state: What an optimizer's `init` or `update` returned, or a train state or
            an `nnx.Optimizer` that contains it.

    Raises:
        StateError: If it contains no loss scale, or more than one.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> policy = lossscale.Fixed(8.0)
        >>> optimizer = optax.chain(ls.loss_scaled(optax.adam(0.1), policy))
        >>> state = optimizer.init(jnp.ones(2))
        >>> lossscale.to_portable(policy, ls.get_scale_state(state))["state"]
        {'scale': 8.0, 'good_steps': 0, 'bad_steps': 0}
    """
    state = _find_only_state(opt_state).scale_state
    return type(state)(*(_unwrap(value) for value in state))


def get_scale(opt_state: PyTree) -> jax.Array:
    """Return the current loss scale from nested optimizer states, a float32 array.

    Raises:
        StateError: If it contains no loss scale, or more than one.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> optimizer = ls.loss_scaled(optax.adam(0.1), lossscale.Fixed(8.0))
        >>> ls.get_scale(optimizer.init(jnp.ones(2)))
        Array(8., dtype=float32)
    """
    scale: jax.Array = get_scale_state(opt_state).scale
    return scale


def scale_loss(loss: PyTree, opt_state: PyTree) -> PyTree:
    """Return the loss times the scale that the optimizer will divide by, in float32.

    Args:
        loss: The loss; a float16 loss is upcast first.
        opt_state: The state that is passed to the optimizer's next `update`.

    Raises:
        StateError: If the state contains no loss scale, or more than one.
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
    return functional.scale(loss, get_scale_state(opt_state))


def with_scale_state(opt_state: State, state: ScaleState) -> State:
    """Return the same nested optimizer states with another loss scale.

    Use it to continue from a portable state or from another library's state.

    Args:
        opt_state: Nested optimizer states that contain one `LossScaledState`.
        state: What `lossscale.jax.init(policy, state)` returned.

    Raises:
        StateError: If it contains no loss scale, or more than one, or if `state` is not
            a `ScaleState`.

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
    _find_only_state(opt_state)
    if not is_state(state):
        message = (
            f"The new state is {describe_type(state)}, expected a ScaleState, such "
            "as lossscale.jax.init(policy, state) returns."
        )
        raise StateError(message)

    def replace(node: Any) -> Any:
        return node._replace(scale_state=state) if _is_state(node) else node

    new_state: State = jax.tree.map(replace, opt_state, is_leaf=_is_state)
    return new_state


def _is_state(node: object) -> bool:
    return isinstance(node, LossScaledState)


def _find_only_state(opt_state: PyTree) -> LossScaledState:
    """Return the only `LossScaledState` in nested optimizer states, or raise."""
    states = find_states(opt_state)
    if len(states) == 1:
        return states[0]
    if states:
        message = (
            f"The optimizer state contains {len(states)} loss scales, expected one. "
            "Select the one that belongs to the loss: find_states(opt_state)[i]."
        )
    else:
        message = (
            f"The {name_type(opt_state)} contains no LossScaledState. Pass the "
            "state of an optimizer that loss_scaled returned; a checkpoint loaded as "
            "plain dictionaries must be restored into such a state first."
        )
    raise StateError(message)


def _unwrap(value: Any) -> jax.Array:
    """Return an array, without the variable in which flax's nnx wraps it."""
    array: jax.Array = value.get_value() if hasattr(value, "get_value") else value
    return array
