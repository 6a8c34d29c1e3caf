# SPDX-License-Identifier: Apache-2.0
"""`loss_scaled`: an optax optimizer that unscales, checks, skips and updates the scale.

It guarantees:

- The wrapped optimizer receives unscaled gradients in float32 or wider, so it clips,
  adds noise and computes moments from the true gradients.
- On a skipped step the updates are zero and the inner state stays bit for bit the same,
  including the step counts of schedules and random keys. No number of skipped steps in
  a row makes one pass.
- No finite number of the inner state, and no finite parameter, becomes infinite or NaN.
  Only the gradients that reach float16 moments are limited, so clipping in the wrapped
  optimizer counts.
- The state is one NamedTuple of arrays. Its shapes and dtypes never change, so it works
  with `jit`, `scan`, `vmap`, donation and checkpoints.

Wrap everything that reads gradients: one loss, one `loss_scaled`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from lossscale.core import validation
from lossscale.core.policies import (
    Dynamic,
    Policy,
    require_policy,
    wanted_measurements,
)
from lossscale.errors import SettingError, StateError
from lossscale.jax import functional
from lossscale.jax.consensus import reduce_signal
from lossscale.jax.gradient import is_overwrite_with_gradient
from lossscale.jax.selection import check_same_structure, keep_finite, select_leaves
from lossscale.jax.types import AxisName, LeafPredicate, PyTree
from lossscale.optax import parameters
from lossscale.optax.state import LossScaledState, find_states

if TYPE_CHECKING:
    from lossscale.core.state import Array

_HEADROOM = 4
"""A gradient may be a quarter of the largest squarable number: AdaBelief and Adan
square the difference of two gradients, which may be rounded up."""


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy | None = None,
    *,
    axis_name: AxisName = None,
    passthrough: LeafPredicate | None = None,
    skip: Literal["select", "cond"] = "select",
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it takes the gradients of a scaled loss.

    Scale the loss with `scale_loss(loss, opt_state)`. A gradient that is finite and
    cannot be squared skips the step and leaves the scale: optimizers store squares, and
    a lower scale does not make an unscaled gradient smaller. A number of the inner
    state that would still become infinite, such as a sum of squares over many steps or
    a moment in float16, keeps its value.

    Parameters in float16 or bfloat16 are passed to `inner` in float32, so that its
    moments are float32; updates are returned in the dtype of the gradients. Integer
    parameters are not passed to `inner`; their updates are 0.

    Extra arguments are passed to `inner` unchanged: pass the unscaled loss. An argument
    called `value`, optax's name for the loss, also informs a policy with
    `hold_on_nonfinite_loss`.

    Args:
        inner: The optimizer; a whole chain, including its clipping.
        policy: How the scale changes; `Dynamic()` by default.
        axis_name: The axis of `shard_map`, `pmap` or `vmap`, or a tuple of axes, whose
            devices skip together. Leave it out under `jit` with sharded arrays: every
            value is global there. The gradients are not averaged.
        passthrough: Decides by key path and leaf which leaves are no gradients; `inner`
            receives them unchanged. By default the state of float8 layers.
        skip: "select" computes the step and selects the old state if it is skipped: it
            fuses with the optimizer. "cond" branches, and saves the optimizer's work on
            a skipped step; on a CPU it is the faster one for a donated state, which
            "select" copies.

    Raises:
        SettingTypeError: If `inner` is no optimizer, or `policy` no policy.
        SettingError: If `skip` is neither "select" nor "cond"; from `init`, if `inner`
            already has a loss scale.

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
    policy = Dynamic() if policy is None else policy
    parameters.check_optimizer("inner", inner)
    require_policy(policy)
    wrapper = _LossScaledOptimizer(
        optimizer=optax.with_extra_args_support(inner),
        policy=policy,
        axis_name=axis_name,
        passthrough=is_overwrite_with_gradient if passthrough is None else passthrough,
        uses_cond=validation.check_choice("skip", skip, ("select", "cond")) == "cond",
    )
    return optax.GradientTransformationExtraArgs(wrapper.init, wrapper.update)


@dataclass(frozen=True)
class _LossScaledOptimizer:
    """The two functions of the gradient transformation, and their settings."""

    optimizer: optax.GradientTransformationExtraArgs
    policy: Policy
    axis_name: AxisName
    passthrough: LeafPredicate
    uses_cond: bool

    def init(self, params: optax.Params) -> LossScaledState:
        """Return the first state."""
        inner_state = self.optimizer.init(parameters.upcast(params))
        if find_states(inner_state):
            message = (
                "The optimizer inside loss_scaled already has a loss scale; its "
                "gradients would be unscaled twice. Use loss_scaled once, outermost."
            )
            raise SettingError(message)
        return LossScaledState(
            scale_state=functional.init(self.policy),
            inner_state=inner_state,
            last_finite=jnp.asarray(True),
            last_too_large=jnp.asarray(False),
            notfinite_count=jnp.zeros((), jnp.int32),
            total_notfinite=jnp.zeros((), jnp.int32),
        )

    def update(
        self,
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        """Return the updates and the next state; `updates` are scaled gradients."""
        _check_state(state)
        unscaled, signal = functional.unscale_locally(
            updates,
            state.scale_state,
            passthrough=self.passthrough,
            loss=extra_args.get("value"),
            names=frozenset(wanted_measurements(self.policy)),
            divisor=_HEADROOM,
        )
        signal = reduce_signal(signal, self.axis_name)
        grads = parameters.mask(unscaled, params)
        inner_params = None if params is None else parameters.upcast(params)

        def compute() -> tuple[PyTree, PyTree]:
            try:
                inner_updates, inner_state = self.optimizer.update(
                    grads, state.inner_state, inner_params, **extra_args
                )
            except (TypeError, ValueError):
                parameters.check_gradients_fit(updates, params)
                raise
            return parameters.limit(inner_updates, updates, params), inner_state

        apply = _apply_with_cond if self.uses_cond else _apply_with_select
        new_updates, inner_state = apply(signal.finite, compute, state.inner_state)
        too_large: Array = signal.too_large
        return new_updates, LossScaledState(
            scale_state=functional.update(self.policy, state.scale_state, signal),
            inner_state=inner_state,
            last_finite=signal.finite,
            last_too_large=too_large,
            notfinite_count=jnp.where(
                signal.finite, 0, optax.safe_increment(state.notfinite_count)
            ),
            total_notfinite=jnp.where(
                signal.finite,
                state.total_notfinite,
                optax.safe_increment(state.total_notfinite),
            ),
        )


def _check_state(state: object) -> None:
    """Raise unless this is a state of `loss_scaled`, not of another optimizer."""
    if isinstance(state, LossScaledState):
        return
    message = (
        f"The optimizer state is {validation.describe_type(state)}, expected the "
        "LossScaledState that init(params) of this optimizer returned. To continue "
        "from a state of the wrapped optimizer, pass "
        "optimizer.init(params)._replace(inner_state=state)."
    )
    raise StateError(message)


def _apply_with_select(
    finite: jax.Array, compute: Callable[[], tuple[PyTree, PyTree]], inner_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Compute the step; return zeros and the old inner state if it is skipped."""
    updates, new_state = compute()
    check_same_structure(new_state, inner_state)
    zeros = jax.tree.map(jnp.zeros_like, updates)
    selected: tuple[PyTree, PyTree] = select_leaves(
        finite, (updates, new_state), (zeros, inner_state)
    )
    return selected


def _apply_with_cond(
    finite: jax.Array, compute: Callable[[], tuple[PyTree, PyTree]], inner_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Compute the step in a branch; the other returns zeros and the old inner state."""
    shapes = jax.eval_shape(compute)[0]
    # zeros_like of a shape that knows along which axes of a shard_map it varies.
    zeros = jax.tree.map(jnp.zeros_like, shapes)

    def apply() -> tuple[PyTree, PyTree]:
        updates, new_state = compute()
        check_same_structure(new_state, inner_state)
        selected: tuple[PyTree, PyTree] = keep_finite(
            (updates, new_state), (zeros, inner_state)
        )
        return selected

    def skip() -> tuple[PyTree, PyTree]:
        return zeros, inner_state

    result: tuple[PyTree, PyTree] = jax.lax.cond(finite, apply, skip)
    return result
