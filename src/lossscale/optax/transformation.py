# SPDX-License-Identifier: Apache-2.0
"""`loss_scaled`: an optax optimizer that unscales, checks, skips and moves the scale.

What it guarantees:

- The optimizer inside sees unscaled gradients in float32 or wider, so it clips, adds
  noise and takes moments of the right numbers.
- On a step that is not finite the updates are zero and the inner state stays bit for
  bit as it was, schedules' step counts and random keys included. There is no number
  of skipped steps after which one is applied all the same.
- No number of the inner state, and no parameter, that is finite becomes infinite or
  NaN. What the optimizer's clipping has made small enough for float16 moments is small
  enough: what counts is what arrives there, not the gradient.
- The state is one NamedTuple of arrays. Its shapes and dtypes never change, so it
  goes through `jit`, `scan`, `vmap`, donation and checkpoints as it is.

Place it outside everything that reads gradients: one loss, one `loss_scaled`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lossscale.core import validation
from lossscale.core.policies import Dynamic, Policy
from lossscale.core.state import Array
from lossscale.errors import SettingError, SettingTypeError, StateError
from lossscale.jax import verbs
from lossscale.jax.agreement import agreed
from lossscale.jax.leaves import AsIs, overwritten
from lossscale.jax.selecting import check_same_structure, choose, keep_finite
from lossscale.jax.value_and_grad import check_policy
from lossscale.optax import parameters
from lossscale.optax.states import LossScaledState, find_states

_HEADROOM = 4
"""A gradient may be a quarter of what can be squared: AdaBelief and Adan square the
difference of two, which may be rounded up."""


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy | None = None,
    *,
    axis_name: Any = None,
    as_is: AsIs | None = None,
    skip: str = "select",
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it takes the gradients of a scaled loss.

    Scale the loss with `scale_loss(loss, opt_state)`. A gradient that is finite and
    cannot be squared skips the step and leaves the scale: optimizers keep squares, and
    no lower scale makes it smaller. A number of the inner state that would become
    infinite all the same, as a sum of squares over many steps or a moment in float16,
    keeps its value.

    Parameters in float16 or bfloat16 are passed to `inner` in float32, so that its
    moments are kept in float32; updates come back in the dtype of the gradients.
    Integer parameters do not reach `inner`; their updates are 0.

    Extra arguments reach `inner` as they are: give it the loss unscaled. Where there
    is one called `value`, optax's name for the loss, it also tells a policy with
    `hold_on_nonfinite_loss` what it needs.

    Args:
        inner: The optimizer; a whole chain, with its clipping.
        policy: How the scale moves; `Dynamic()` by default.
        axis_name: The axis of `shard_map`, `pmap` or `vmap`, or a tuple of axes, whose
            members skip together. Leave it out under `jit` with sharded arrays: every
            value is global there. The gradients are not averaged.
        as_is: Says of a key path and a leaf whether it is no gradient: it reaches
            `inner` as it came. State of float8 layers unless given.
        skip: "select" computes the step and keeps the old state where it was bad: it
            fuses with the optimizer. "cond" branches, and saves the optimizer's work
            on a bad step.

    Raises:
        SettingTypeError: If `inner` is no optimizer, or `policy` no policy.
        SettingError: If `skip` is neither of the two; from `init`, if `inner` already
            has a loss scale.

    Example:
        >>> import jax.numpy as jnp, optax, lossscale, lossscale.optax as ls
        >>> optimizer = ls.loss_scaled(
        ...     optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        ...     lossscale.Dynamic(init_scale=1024.0),
        ... )
        >>> params = {"w": jnp.ones(2)}
        >>> state = optimizer.init(params)
        >>> overflow = {"w": jnp.array([jnp.inf, 1.0])}
        >>> updates, state = optimizer.update(overflow, state, params)
        >>> updates["w"], state.last_finite, ls.get_scale(state)
        (Array([0., 0.], dtype=float32), Array(False, dtype=bool), Array(512., dtype=float32))
    """  # noqa: E501
    settings = Dynamic() if policy is None else policy
    _check(inner, settings)
    passes = overwritten if as_is is None else as_is
    branches = validation.check_choice("skip", skip, ("select", "cond")) == "cond"
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Any) -> LossScaledState:
        inner_state = optimizer.init(parameters.widen(params))
        if find_states(inner_state):
            message = (
                "The optimizer inside loss_scaled already has a loss scale; its "
                "gradients would be unscaled twice. Use loss_scaled once, outermost."
            )
            raise SettingError(message)
        return LossScaledState(
            scale_state=verbs.init(settings),
            inner_state=inner_state,
            last_finite=jnp.asarray(True),
            last_too_large=jnp.asarray(False),
            notfinite_count=jnp.zeros((), jnp.int32),
            total_notfinite=jnp.zeros((), jnp.int32),
        )

    def update(
        updates: Any, state: LossScaledState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        _check_state(state)
        unscaled, _, signal = verbs.unscale_alone(
            updates,
            state.scale_state,
            as_is=passes,
            loss=extra.get("value"),
            divisor=_HEADROOM,
        )
        signal = agreed(signal, axis_name)
        seen = parameters.hide(unscaled, params)
        wide = None if params is None else parameters.widen(params)

        def take() -> tuple[Any, Any]:
            moved, inner_state = optimizer.update(
                seen, state.inner_state, wide, **extra
            )
            return parameters.limit(moved, updates, params), inner_state

        if branches:
            moved, inner_state = _branch(signal.finite, take, state.inner_state)
        else:
            moved, inner_state = take()
            check_same_structure(inner_state, state.inner_state)
            zeros = jax.tree.map(jnp.zeros_like, moved)
            moved, inner_state = choose(
                signal.finite, (moved, inner_state), (zeros, state.inner_state)
            )
        return moved, LossScaledState(
            scale_state=verbs.update(settings, state.scale_state, signal),
            inner_state=inner_state,
            last_finite=signal.finite,
            last_too_large=signal.too_large,
            notfinite_count=jnp.where(
                signal.finite, 0, optax.safe_increment(state.notfinite_count)
            ),
            total_notfinite=jnp.where(
                signal.finite,
                state.total_notfinite,
                optax.safe_increment(state.total_notfinite),
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check(inner: Any, policy: Any) -> None:
    """Raise unless both are what they should be."""
    if isinstance(inner, type) or not (
        hasattr(inner, "init") and hasattr(inner, "update")
    ):
        message = (
            "inner must be an optax optimizer, such as optax.adam(1e-3), got "
            f"{validation.format_value(inner)}."
        )
        raise SettingTypeError(message)
    check_policy(policy)


def _check_state(state: Any) -> None:
    """Raise unless this is a state of `loss_scaled`, not that of another optimizer."""
    if isinstance(state, LossScaledState):
        return
    message = (
        f"The optimizer state is a {type(state).__name__}, expected the "
        "LossScaledState that init(params) of this optimizer returned. To continue "
        "with a state of the optimizer inside: "
        "optimizer.init(params)._replace(inner_state=state)."
    )
    raise StateError(message)


def _branch(finite: Array, take: Any, inner_state: Any) -> tuple[Any, Any]:
    """Take the step in a branch of its own; the other has nothing to do."""
    shapes = jax.eval_shape(take)[0]
    # zeros_like of a shape that knows along which axes of a shard_map it varies.
    zeros = jax.tree.map(jnp.zeros_like, shapes)

    def step() -> tuple[Any, Any]:
        moved, after = take()
        check_same_structure(after, inner_state)
        kept: tuple[Any, Any] = keep_finite((moved, after), (zeros, inner_state))
        return kept

    def stay() -> tuple[Any, Any]:
        return zeros, inner_state

    taken: tuple[Any, Any] = jax.lax.cond(finite, step, stay)
    return taken
