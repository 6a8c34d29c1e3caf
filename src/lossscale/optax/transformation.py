# SPDX-License-Identifier: Apache-2.0
"""`loss_scaled`: an optax optimizer that unscales, checks, skips and moves the scale.

What it promises:

- The optimizer inside sees unscaled gradients in float32 or wider, so it clips, adds
  noise and takes moments of the right numbers.
- On a step that is not finite the updates are zero and the inner state stays bit for
  bit as it was, schedules' step counts and random keys included. There is no number
  of bad steps after which one is applied all the same.
- The state is one NamedTuple of arrays. Its shapes and dtypes never change, so it
  goes through `jit`, `scan`, `vmap`, donation and checkpoints as it is.

Place it outside everything that reads gradients: one loss, one `loss_scaled`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lossscale.core import headroom, validation
from lossscale.core.policies import Dynamic, Policy
from lossscale.core.state import Array
from lossscale.errors import SettingError, SettingTypeError
from lossscale.jax import leaves, verbs
from lossscale.jax.agreement import agreed
from lossscale.jax.leaves import AsIs, overwritten
from lossscale.jax.value_and_grad import check_policy
from lossscale.optax.states import LossScaledState, find_states


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy | None = None,
    *,
    axis_name: Any = None,
    as_is: AsIs | None = None,
    skip: str = "select",
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it takes the gradients of a scaled loss.

    Scale the loss with `scale_loss(loss, opt_state)`. A gradient whose square would
    overflow counts as an overflow: optimizers keep squares, and an infinite moment
    never comes back.

    Parameters in float16 or bfloat16 are shown to `inner` in float32, so that its
    moments are kept in float32; `optax.apply_updates` rounds the sum back.

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
        inner_state = optimizer.init(_widened(params))
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
            notfinite_count=jnp.zeros((), jnp.int32),
            total_notfinite=jnp.zeros((), jnp.int32),
        )

    def update(
        updates: Any, state: LossScaledState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        unscaled, signal = verbs.unscale(
            updates, state.scale_state, as_is=passes, loss=extra.get("value")
        )
        # This looks at all that `signal.finite` does, and the compiler drops that.
        signal = signal._replace(finite=_holds(unscaled, state.inner_state, passes))
        signal = agreed(signal, axis_name)
        wide = None if params is None else _widened(params)

        def take() -> tuple[Any, Any]:
            taken: tuple[Any, Any] = optimizer.update(
                unscaled, state.inner_state, wide, **extra
            )
            return taken

        if branches:
            moved, inner_state = _branch(signal.finite, take, state.inner_state)
        else:
            moved, inner_state = take()
            moved = verbs.select(
                signal.finite, moved, jax.tree.map(jnp.zeros_like, moved)
            )
            inner_state = verbs.select(signal.finite, inner_state, state.inner_state)
        return moved, LossScaledState(
            scale_state=verbs.update(settings, state.scale_state, signal),
            inner_state=inner_state,
            last_finite=signal.finite,
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


def _holds(unscaled: Any, inner_state: Any, as_is: AsIs) -> Array:
    """Return whether every gradient is finite, and the optimizer can keep it.

    Its square can be added up, and so can that of the difference of two (AdaBelief,
    Adan). Where the optimizer keeps float16 (`mu_dtype`), the gradient fits into that.
    """
    found = leaves.gradient_leaves(unscaled, as_is)
    parts = [part for _, leaf in found for part in leaves.parts(leaf)]
    elements = sum(part.size for part in parts)
    kept = {str(getattr(leaf, "dtype", "")) for leaf in jax.tree.leaves(inner_state)}
    largest = headroom.LARGEST["float16"] if "float16" in kept else math.inf
    roots = [
        min(
            largest,
            # A quarter: half for a difference, half for what sums are rounded up by.
            headroom.largest_square_root(None, part.dtype.name, elements) / 4,
        )
        for part in parts
    ]
    # NaN fails the comparison.
    return leaves.together(
        [jnp.all(jnp.abs(p) <= root) for p, root in zip(parts, roots, strict=True)]
    )


def _branch(finite: Array, take: Any, inner_state: Any) -> tuple[Any, Any]:
    """Take the step in a branch of its own; the other has nothing to do."""
    shapes = jax.eval_shape(take)[0]

    def stay() -> tuple[Any, Any]:
        # zeros_like of a shape that knows along which axes of a shard_map it varies.
        return jax.tree.map(jnp.zeros_like, shapes), inner_state

    taken: tuple[Any, Any] = jax.lax.cond(finite, take, stay)
    return taken


def _widened(params: Any) -> Any:
    """Return parameters with float16 and bfloat16 ones in float32."""

    def widen(leaf: Any) -> Any:
        # optax.tree_map_params calls init with a leaf that is no array at all.
        narrow = str(getattr(leaf, "dtype", None)) in headroom.NARROW
        return leaf.astype(jnp.float32) if narrow else leaf

    return jax.tree.map(widen, params)
