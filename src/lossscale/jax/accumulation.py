# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation over micro-batches with `lax.scan`.

Every micro-batch is unscaled, checked and added in float32 or wider. A micro-batch that
overflowed, or has a gradient that is too large, is dropped, or the whole step is
skipped; in both cases the policy is informed of an overflow.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core import validation
from lossscale.core.policies import Policy, require_policy, wanted_measurements
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.jax import functional, gradient
from lossscale.jax.arguments import (
    check_function,
    check_state,
    get_argument,
    normalize_argnums,
)
from lossscale.jax.consensus import count_devices, reduce_signal
from lossscale.jax.function_names import copy_name
from lossscale.jax.gradient import is_overwrite_with_gradient
from lossscale.jax.types import AxisName, KeyPath, LeafPredicate, PyTree
from lossscale.jax.value_and_grad import differentiate_scaled


class AccumulationResult(NamedTuple):
    """The result of a function that `accumulate_gradients` returned.

    Example:
        >>> import lossscale.jax as ls
        >>> ls.AccumulationResult._fields
        ('value', 'grads', 'signal', 'state', 'used')
    """

    value: PyTree
    """The mean loss of the micro-batches that were used, NaN without any; with
    `has_aux` the pair of it and the auxiliary data, one row for each micro-batch."""
    grads: PyTree
    """The mean of the unscaled gradients of the micro-batches that were used."""
    signal: Signal
    """The result of the check; `signal.finite` says whether to apply the step."""
    state: ScaleState
    """The state for the next step; one micro-batch that overflowed is an overflow."""
    used: jax.Array
    """Which micro-batches were used: a row of booleans."""


def accumulate_gradients(
    fun: Callable[..., Any],
    policy: Policy,
    *,
    on_overflow: Literal["drop", "skip"] = "drop",
    batch_argnums: int | Sequence[int] = 1,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName = None,
    passthrough: LeafPredicate = is_overwrite_with_gradient,
) -> Callable[..., AccumulationResult]:
    """Return a function that differentiates `fun` on one micro-batch after another.

    Call it as `(state, *args)`. The arguments at `batch_argnums` have one axis more
    than `fun` takes: the first axis counts the micro-batches. All of them use one
    scale. State of float8 layers (see `is_overwrite_with_gradient`) is the largest of
    the micro-batches that were used.

    Args:
        fun: Returns the mean loss of a micro-batch, or with `has_aux` a pair of it and
            auxiliary data.
        policy: Any policy.
        on_overflow: "drop" leaves out a micro-batch that overflowed, or has a gradient
            that is too large, and averages the others; the step is skipped if none is
            left. "skip" skips the whole step.
        batch_argnums: Which arguments of `fun` are split into micro-batches.
        argnums: Which arguments of `fun` to differentiate.
        has_aux: Whether `fun` returns a pair.
        axis_name: The mapped axes whose devices make one decision; see `unscale`. A
            micro-batch is dropped by all of them or by none.
        passthrough: Which gradients are not unscaled; see `unscale`.

    Raises:
        SettingTypeError: If `fun` is not a function, `policy` not a policy, or
            `has_aux` not a boolean.
        SettingError: If `on_overflow` is neither "drop" nor "skip".

    Example:
        >>> import jax, jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> policy = lossscale.Dynamic(init_scale=8.0)
        >>> step = ls.accumulate_gradients(lambda weight, x: weight * x, policy)
        >>> batches = jnp.array([1.0, jnp.inf, 3.0])
        >>> value, grads, signal, state, used = step(ls.init(policy), 1.0, batches)
        >>> float(grads), bool(signal.finite), float(state.scale), used.tolist()
        (2.0, True, 4.0, [True, False, True])
    """
    check_function("fun", fun, "a function that returns the loss")
    require_policy(policy)
    validation.check_bool("has_aux", has_aux)
    drops = (
        validation.check_choice("on_overflow", on_overflow, ("drop", "skip")) == "drop"
    )
    names = frozenset(wanted_measurements(policy))
    positions = normalize_argnums("argnums", argnums)
    split = normalize_argnums("batch_argnums", batch_argnums)
    batch_positions = [split] if isinstance(split, int) else list(split)

    @copy_name(fun)
    def accumulated_value_and_grad(
        state: ScaleState, /, *args: Any
    ) -> AccumulationResult:
        check_state(state)

        def add_micro_batch(
            sums: _Sums, micro_batch: list[PyTree]
        ) -> tuple[_Sums, tuple[PyTree, Signal]]:
            all_args = list(args)
            for position, part in zip(batch_positions, micro_batch, strict=True):
                all_args[position] = part
            value, grads = differentiate_scaled(
                fun, state, tuple(all_args), {}, argnums=positions, has_aux=has_aux
            )
            unscaled, signal = functional.unscale_locally(
                grads,
                state,
                passthrough=passthrough,
                loss=value[0] if has_aux else value,
                names=names,
                divisor=count_devices(axis_name),
            )
            if drops:  # else the devices decide once, at the end
                signal = reduce_signal(signal, axis_name)
            return _add(sums, unscaled, signal.finite, passthrough), (value, signal)

        batches = [
            get_argument("batch_argnums", args, position)
            for position in batch_positions
        ]
        sums = _init_sums(args, positions)
        if _is_varying(args):
            # Sums vary along axes of a shard_map along which plain zeros do not.
            first = jax.tree.map(lambda rows: rows[0], batches)
            shapes, _ = jax.eval_shape(add_micro_batch, sums, first)
            sums = jax.tree.map(jnp.zeros_like, shapes)
        sums, (values, signals) = jax.lax.scan(add_micro_batch, sums, batches)
        combined = _combine_signals(signals)
        used = signals.finite
        if not drops:
            combined = reduce_signal(combined, axis_name)
            used = jnp.broadcast_to(combined.finite, used.shape)
        count = jnp.sum(used, dtype=jnp.int32)
        # A step that uses no micro-batch is an overflow.
        combined = combined._replace(finite=combined.finite & (count > 0))
        loss = _average_losses(values[0] if has_aux else values, used, count)
        return AccumulationResult(
            (loss, values[1]) if has_aux else loss,
            _average_gradients(sums.grads, count, passthrough),
            _to_step_signal(combined, applied=count > 0),
            functional.update(policy, state, combined),
            used,
        )

    return accumulated_value_and_grad


class _Sums(NamedTuple):
    """The carry of the scan."""

    grads: PyTree
    """The sums of the gradients of the micro-batches that were used."""
    is_started: jax.Array
    """Whether any micro-batch was used."""


def _is_varying(tree: PyTree) -> bool:
    """Whether any leaf varies over the devices of a shard_map that checks it."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    types: list[Any] = [jax.typeof(leaf) for leaf in arrays]
    # JAX has renamed the attribute.
    types = [getattr(kind, "manual_axis_type", kind) for kind in types]
    return any(getattr(t, "varying", getattr(t, "vma", None)) for t in types)


def _init_sums(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> _Sums:
    """Return zeros in the shapes and dtypes of the unscaled gradients."""

    def make_zeros(leaf: Any) -> jax.Array | None:
        if not gradient.is_differentiable(leaf):
            return None
        return jnp.zeros_like(gradient.upcast(jnp.asarray(leaf)))

    if isinstance(argnums, int):
        trees = get_argument("argnums", args, argnums)
    else:
        trees = tuple(get_argument("argnums", args, position) for position in argnums)
    return _Sums(jax.tree.map(make_zeros, trees), jnp.asarray(False))


def _add(
    sums: _Sums, grads: PyTree, finite: jax.Array, passthrough: LeafPredicate
) -> _Sums:
    """Add the gradients of a micro-batch to the sums if it is finite."""

    def add(path: KeyPath, total: jax.Array, grad: jax.Array) -> jax.Array:
        if passthrough(path, grad):
            grad = grad.astype(total.dtype)
            return jnp.where(sums.is_started, jnp.maximum(total, grad), grad)
        return total + grad

    new = jax.tree_util.tree_map_with_path(add, sums.grads, grads)
    # Multiplying by 0 would keep NaN; selecting does not.
    totals = jax.tree.map(
        lambda new_leaf, old_leaf: jnp.where(finite, new_leaf, old_leaf),
        new,
        sums.grads,
    )
    return _Sums(totals, sums.is_started | finite)


def _combine_signals(signals: Signal) -> Signal:
    """Return the policy's signal for a step, from a row of each field."""
    too_large: Array = signals.too_large
    loss_finite: Array = signals.loss_finite
    overflow = ~(signals.finite | too_large)
    measured = {
        name: reduce(getattr(signals, name))
        for name, reduce in _REDUCTIONS.items()
        if getattr(signals, name) is not None
    }
    return Signal(
        **measured,
        finite=jnp.all(signals.finite),
        too_large=jnp.any(too_large) & ~jnp.any(overflow),
        # An overflow with a finite loss is an overflow, even if another loss is NaN.
        loss_finite=jnp.all(loss_finite) | jnp.any(overflow & loss_finite),
    )


_REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "nan": jnp.any,
    "amax": jnp.max,
    "norm": jnp.max,
    "zero_fraction": jnp.mean,
    "subnormal_fraction": jnp.mean,
    "above_edge": jnp.mean,
}
"""How the measurements of micro-batches, whose sizes are equal, become one."""


def _to_step_signal(combined: Signal, *, applied: jax.Array) -> Signal:
    """Return the caller's signal: whether the step may be applied."""
    too_large: Array = combined.too_large
    return combined._replace(finite=applied, too_large=too_large & ~applied)


def _average_losses(losses: jax.Array, used: jax.Array, count: jax.Array) -> jax.Array:
    """Return the mean loss of the micro-batches that were used; NaN without any."""
    used_losses = jnp.where(used, gradient.upcast(losses), 0)
    return jnp.sum(used_losses) / count.astype(used_losses.dtype)  # 0 / 0 is NaN


def _average_gradients(
    sums: PyTree, count: jax.Array, passthrough: LeafPredicate
) -> PyTree:
    """Return the sums divided by the number of micro-batches that were used.

    Each gradient can be squared, so the sum is finite and the mean can be squared, too.
    """

    def divide(leaf: jax.Array) -> jax.Array:
        dtype = gradient.get_real_dtype(leaf)
        return gradient.multiply(leaf, 1.0 / jnp.maximum(count, 1).astype(dtype))

    return gradient.map_gradients(divide, sums, passthrough)[0]
