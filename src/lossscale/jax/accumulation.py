# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation over micro-batches with `lax.scan`.

Every micro-batch is unscaled, checked and then added up in float32 or wider. A bad one
is dropped, or it makes the whole step a bad one; either way the policy hears of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core import validation
from lossscale.core.policies import Policy
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.jax import leaves, verbs
from lossscale.jax.agreement import agreed, devices
from lossscale.jax.leaves import AsIs, KeyPath, overwritten
from lossscale.jax.signatures import named_like
from lossscale.jax.value_and_grad import (
    check_policy,
    is_differentiable,
    scaled_value_and_grad,
)


class Accumulated(NamedTuple):
    """What the micro-batches of a step add up to.

    Example:
        >>> import lossscale.jax as ls
        >>> ls.Accumulated._fields
        ('value', 'grads', 'signal', 'state', 'used')
    """

    value: Any
    """The mean loss of the micro-batches that were used, NaN without any; with
    `has_aux` the pair of it and the rest, one row for each micro-batch."""
    grads: Any
    """The mean of the unscaled gradients of the micro-batches that were used."""
    signal: Signal
    """Whether the step may be applied."""
    state: ScaleState
    """The state for the next step; one bad micro-batch counts as an overflow."""
    used: Array
    """Which micro-batches were used: a row of booleans."""


def accumulating(
    fun: Callable[..., Any],
    policy: Policy,
    *,
    bad: Literal["drop", "skip"] = "drop",
    batch_argnums: int | Sequence[int] = 1,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Any = None,
    as_is: AsIs = overwritten,
) -> Callable[..., Accumulated]:
    """Return a function that differentiates `fun` on one micro-batch after another.

    Call it as `(state, *args)`. The arguments at `batch_argnums` have one axis more
    than `fun` takes: the first axis counts the micro-batches. All of them see one
    scale. State of float8 layers (see `overwritten`) is the largest of those used.

    Args:
        fun: Returns the mean loss of a micro-batch, or with `has_aux` a pair of it and
            anything else.
        policy: Any policy.
        bad: "drop" leaves bad micro-batches out and takes the mean of the others; the
            step is bad if none is left. "skip" makes the whole step a bad one.
        batch_argnums: Which arguments of `fun` are cut into micro-batches.
        argnums: Which arguments of `fun` to differentiate.
        has_aux: Whether `fun` returns a pair.
        axis_name: The mapped axes whose devices decide together; see `unscale`. A
            micro-batch is dropped by all of them or by none.
        as_is: Which gradients are not unscaled; see `unscale`.

    Raises:
        SettingTypeError: If `policy` is not a policy.
        SettingError: If `bad` is neither word.

    Example:
        >>> import jax, jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> policy = lossscale.Dynamic(init_scale=8.0)
        >>> step = jax.jit(ls.accumulating(lambda weight, x: weight * x, policy))
        >>> batches = jnp.array([1.0, jnp.inf, 3.0])
        >>> value, grads, signal, state, used = step(ls.init(policy), 1.0, batches)
        >>> float(grads), bool(signal.finite), float(state.scale), used.tolist()
        (2.0, True, 4.0, [True, False, True])
    """
    check_policy(policy)
    drops = validation.check_choice("bad", bad, ("drop", "skip")) == "drop"
    places = [batch_argnums] if isinstance(batch_argnums, int) else list(batch_argnums)

    @named_like(fun)
    def accumulated(state: ScaleState, /, *args: Any) -> Accumulated:
        def one(total: Any, batch: list[Any]) -> tuple[Any, Any]:
            every = list(args)
            for place, part in zip(places, batch, strict=True):
                every[place] = part
            value, grads = scaled_value_and_grad(
                fun, state, tuple(every), {}, argnums=argnums, has_aux=has_aux
            )
            loss = value[0] if has_aux else value
            names = axis_name if drops else None  # else they agree once, in the end
            unscaled, signal = verbs.unscale(
                grads, state, axis_name=names, as_is=as_is, loss=loss
            )
            added = _added(total, unscaled, signal.finite, as_is)
            return added, (value, signal.finite, signal.loss_finite)

        batches = [args[place] for place in places]
        start = _zeros(args, argnums)
        if _varies(args):
            # Sums vary along axes of a shard_map along which plain zeros do not.
            first = jax.tree.map(lambda rows: rows[0], batches)
            shapes, _ = jax.eval_shape(one, start, first)
            start = jax.tree.map(jnp.zeros_like, shapes)
        total, (values, finite, loss_finite) = jax.lax.scan(one, start, batches)
        seen = Signal(
            finite=jnp.all(finite),
            # An overflow beside a loss that was not finite is an overflow.
            loss_finite=jnp.all(loss_finite) | jnp.any(~finite & loss_finite),
        )
        seen = seen if drops else agreed(seen, axis_name)
        used = finite if drops else jnp.broadcast_to(seen.finite, finite.shape)
        count = jnp.sum(used, dtype=jnp.int32)
        grads, applicable = _mean(total, count, as_is, devices(axis_name))
        signal = agreed(Signal(applicable & (count > 0)), axis_name)
        if not drops:
            signal = signal._replace(finite=signal.finite & seen.finite)
        # A sum beyond its dtype is an overflow too.
        seen = seen._replace(finite=seen.finite & signal.finite)
        signal = signal._replace(loss_finite=seen.loss_finite)
        losses = values[0] if has_aux else values
        kept = jnp.where(used, leaves.widened(losses), 0)
        value = jnp.sum(kept) / count.astype(kept.dtype)  # 0 / 0 is NaN
        return Accumulated(
            (value, values[1]) if has_aux else value,
            grads,
            signal,
            verbs.update(policy, state, seen),
            used,
        )

    return accumulated


def _varies(tree: Any) -> bool:
    """Whether any leaf differs from device to device of a shard_map that checks it."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    kinds = [jax.typeof(leaf) for leaf in arrays]
    # JAX's name for it has changed.
    kinds = [getattr(kind, "manual_axis_type", kind) for kind in kinds]
    return any(getattr(k, "varying", getattr(k, "vma", None)) for k in kinds)


def _zeros(args: tuple[Any, ...], argnums: int | Sequence[int]) -> Any:
    """Return sums of nothing, in the shapes and dtypes of unscaled gradients."""

    def zero(leaf: Any) -> Any:
        if not is_differentiable(leaf):
            return None
        return jnp.zeros_like(leaves.widened(jnp.asarray(leaf)))

    trees = args[argnums] if isinstance(argnums, int) else [args[at] for at in argnums]
    found = jax.tree.map(zero, trees)
    return (found if isinstance(argnums, int) else tuple(found)), jnp.asarray(False)


def _added(carry: Any, grads: Any, finite: Array, as_is: AsIs) -> Any:
    """Return the sums with one micro-batch more, if it is finite."""
    total, is_started = carry

    def add(path: KeyPath, old: Array, new: Array) -> Array:
        if as_is(path, new):
            new = new.astype(old.dtype)
            return jnp.where(is_started, jnp.maximum(old, new), new)
        return old + new

    proposed = jax.tree_util.tree_map_with_path(add, total, grads)
    # A product with 0 would leave NaN; a choice does not.
    chosen = jax.tree.map(lambda new, old: jnp.where(finite, new, old), proposed, total)
    return chosen, is_started | finite


def _mean(carry: Any, count: Array, as_is: AsIs, addends: int) -> tuple[Any, Array]:
    """Return sums divided by how many were added up, and whether they are finite."""
    total, _ = carry
    mean, results = leaves.map_gradients(
        lambda leaf: leaves.multiplied(
            leaf, 1.0 / jnp.maximum(count, 1).astype(leaves.real_dtype(leaf))
        ),
        total,
        as_is,
    )
    return mean, leaves.together([leaves.is_finite(leaf, addends) for leaf in results])
