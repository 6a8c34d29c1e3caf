# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation over micro-batches with `lax.scan`.

Every micro-batch is unscaled, checked and then added up in float32 or wider. One that
overflowed, or is too large, is dropped, or the whole step is skipped; either way the
policy learns of an overflow.
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
    as_places,
    check_policy,
    is_differentiable,
    pick,
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
    """The state for the next step; one micro-batch that overflowed is an overflow."""
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
    differentiated = as_places("argnums", argnums)
    cut = as_places("batch_argnums", batch_argnums)
    places = [cut] if isinstance(cut, int) else list(cut)

    @named_like(fun)
    def accumulated(state: ScaleState, /, *args: Any) -> Accumulated:
        verbs.check_state(state)

        def one(total: Any, batch: list[Any]) -> tuple[Any, Any]:
            every = list(args)
            for place, part in zip(places, batch, strict=True):
                every[place] = part
            value, grads = scaled_value_and_grad(
                fun, state, tuple(every), {}, argnums=differentiated, has_aux=has_aux
            )
            unscaled, _, signal = verbs.unscale_alone(
                grads,
                state,
                as_is=as_is,
                loss=value[0] if has_aux else value,
                divisor=devices(axis_name),
            )
            if drops:  # else the devices decide once, in the end
                signal = agreed(signal, axis_name)
            return _added(total, unscaled, signal.finite, as_is), (value, signal)

        batches = [pick("batch_argnums", args, place) for place in places]
        start = _zeros(args, differentiated)
        if _varies(args):
            # Sums vary along axes of a shard_map along which plain zeros do not.
            first = jax.tree.map(lambda rows: rows[0], batches)
            shapes, _ = jax.eval_shape(one, start, first)
            start = jax.tree.map(jnp.zeros_like, shapes)
        total, (values, rows) = jax.lax.scan(one, start, batches)
        seen = _combine(rows)
        seen = seen if drops else agreed(seen, axis_name)
        used = (
            rows.finite if drops else jnp.broadcast_to(seen.finite, rows.finite.shape)
        )
        count = jnp.sum(used, dtype=jnp.int32)
        applied = count > 0
        # Without any micro-batch the step is an overflow.
        seen = seen._replace(finite=seen.finite & applied)
        signal = seen._replace(finite=applied, too_large=seen.too_large & ~applied)
        losses = values[0] if has_aux else values
        kept = jnp.where(used, leaves.widened(losses), 0)
        value = jnp.sum(kept) / count.astype(kept.dtype)  # 0 / 0 is NaN
        return Accumulated(
            (value, values[1]) if has_aux else value,
            _mean(total, count, as_is),
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


def _zeros(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> Any:
    """Return sums of nothing, in the shapes and dtypes of unscaled gradients."""

    def zero(leaf: Any) -> Any:
        if not is_differentiable(leaf):
            return None
        return jnp.zeros_like(leaves.widened(jnp.asarray(leaf)))

    if isinstance(argnums, int):
        trees = pick("argnums", args, argnums)
    else:
        trees = tuple(pick("argnums", args, place) for place in argnums)
    return jax.tree.map(zero, trees), jnp.asarray(False)


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


def _combine(rows: Signal) -> Signal:
    """Return what all micro-batches say together to the policy, of a row of each."""
    overflow = ~(rows.finite | rows.too_large)
    return Signal(
        finite=jnp.all(rows.finite),
        too_large=jnp.any(rows.too_large) & ~jnp.any(overflow),
        # An overflow beside a loss that was not finite is an overflow.
        loss_finite=jnp.all(rows.loss_finite) | jnp.any(overflow & rows.loss_finite),
    )


def _mean(carry: Any, count: Array, as_is: AsIs) -> Any:
    """Return sums divided by how many were added up.

    Each of them can be squared, so their sum is finite and their mean can be, too.
    """
    total, _ = carry
    mean, _ = leaves.map_gradients(
        lambda leaf: leaves.multiplied(
            leaf, 1.0 / jnp.maximum(count, 1).astype(leaves.real_dtype(leaf))
        ),
        total,
        as_is,
    )
    return mean
