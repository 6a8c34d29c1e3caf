# SPDX-License-Identifier: Apache-2.0
"""The five verbs as pure functions over pytrees, for every transformation of JAX.

    init(policy)                    the first state, as strong-typed arrays
    scale(loss, state)              the loss times the scale, in float32
    unscale(grads, state)           the gradients divided by it, and what was seen
    update(policy, state, signal)   the state after the step
    select(finite, new, old)        the new values, or the old ones on a bad step

The rule is not restated here: `update` lends `jnp.where` to the policy.

The state goes through a step as an argument and comes back as a result; the policy is
hashable and static. Nothing is compiled again after the first step, and nothing asks
the host.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core import validation
from lossscale.core.policies import Policy
from lossscale.core.portable import check_state
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.core.validation import format_value, require_signal
from lossscale.errors import GradientError
from lossscale.jax import leaves
from lossscale.jax.agreement import agreed, devices
from lossscale.jax.leaves import AsIs, KeyPath, overwritten
from lossscale.jax.measurements import measured
from lossscale.jax.selecting import select

__all__ = ["init", "scale", "select", "unscale", "update"]

AxisName: TypeAlias = Any
"""The name of a mapped axis, or a tuple of names."""


def init(
    policy: Policy, state: ScaleState | None = None, *, device: Any = None
) -> ScaleState:
    """Return the first state of a policy, as float32, int32 and int32 arrays.

    Args:
        policy: Any policy.
        state: A state to go on from, such as one that `from_portable` returned.
        device: Where its arrays go: a device or a sharding. A step over a mesh returns
            its state on all of it; one that starts there as well, with
            `NamedSharding(mesh, PartitionSpec())`, is not compiled a second time.

    Raises:
        StateError: If the state is not one that the policy can go on from.

    Example:
        >>> import lossscale, lossscale.jax as ls
        >>> ls.init(lossscale.Dynamic()).scale
        Array(65536., dtype=float32)
    """
    first = policy.init() if state is None else check_state(policy, state)
    strong = _strong(first)
    return strong if device is None else jax.device_put(strong, device)


def scale(loss: Any, state: ScaleState) -> Any:
    """Return the loss times the scale, in float32 (float64 stays float64).

    A float16 loss is widened first: 65504 is float16's largest number. Its gradient is
    a float16 number still, so scales above 65504 overflow there; return the loss in
    float32 where you can.

    Raises:
        GradientError: If a loss is not a real floating-point number.

    Example:
        >>> import jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> ls.scale(jnp.float16(2.0), ls.init(lossscale.Fixed(1024.0)))
        Array(2048., dtype=float32)
    """
    factor = jnp.asarray(state.scale, jnp.float32)

    def multiply(path: KeyPath, leaf: Any) -> Array:
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            leaf = jnp.asarray(_within_float32(leaf), jnp.float32)
        wide = leaves.widened(leaves.checked("loss", path, leaf))
        if jnp.iscomplexobj(wide):
            place = jax.tree_util.keystr(path)
            message = (
                f"The loss{' at ' + place if place else ''} is {wide.dtype}, expected "
                "a real floating-point number. Use its real part or its magnitude."
            )
            raise GradientError(message)
        return leaves.multiplied(wide, factor)

    return jax.tree_util.tree_map_with_path(multiply, loss)


def unscale(
    grads: Any,
    state: ScaleState,
    *,
    measure: Iterable[str] = (),
    axis_name: AxisName = None,
    as_is: AsIs = overwritten,
    loss: Any = None,
) -> tuple[Any, Signal]:
    """Multiply gradients by 1 / scale, and say whether all of them are finite.

    float16, bfloat16 and float8 gradients become float32, where small ones do not
    vanish again; float64 stays float64. `Signal.finite` looks at the result: an
    infinity stays one when it is unscaled, and a finite gradient may become one. A
    complex gradient is finite if both of its parts are, and is measured as two numbers.

    Args:
        grads: A pytree of scaled gradients. `None` and `float0` leaves pass through.
        state: The state whose scale was used for the loss.
        measure: Further fields of the `Signal` to fill, any of "nan", "amax", "norm",
            "zero_fraction" and "subnormal_fraction".
        axis_name: Inside `shard_map`, `pmap` or `vmap`: the axis, or a tuple of axes,
            over which all devices take one decision. The gradients are not touched:
            average them yourself, before or after. One that could overflow when all
            devices add theirs up counts as an overflow. Without such an axis, as in
            `jit` with sharded arrays, leave it out: every result is global there.
        as_is: Says of a key path and a leaf whether it passes through, not unscaled and
            not looked at; state of float8 layers unless given.
        loss: The loss before it was scaled, if `Signal.loss_finite` is to be filled.

    Raises:
        GradientError: If a gradient is not floating-point.

    Example:
        >>> import jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> state = ls.init(lossscale.Fixed(4.0))
        >>> grads, signal = ls.unscale({"w": jnp.array([8.0, 4.0])}, state)
        >>> grads, bool(signal.finite)
        ({'w': Array([2., 1.], dtype=float32)}, True)
    """
    names = validation.check_measurements(measure)
    inverse = 1.0 / jnp.asarray(state.scale, jnp.float32)
    # The reciprocal of an infinite scale is 0, and so is that of one above 2**126 where
    # subnormal numbers are taken for zero: every gradient would be 0 and every step
    # clean. NaN makes the step a bad one, which lowers the scale.
    inverse = jnp.where(inverse == 0, jnp.nan, inverse)
    unscaled, results = leaves.map_gradients(
        lambda leaf: leaves.multiplied(leaves.widened(leaf), inverse), grads, as_is
    )
    addends = devices(axis_name)
    flags = [leaves.is_finite(result, addends) for result in results]
    signal = Signal(finite=leaves.together(flags))
    if loss is not None:
        flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(loss)]
        signal = signal._replace(loss_finite=leaves.together(flags))
    if names:
        came = [leaf for _, leaf in leaves.gradient_leaves(grads, as_is)]
        signal = signal._replace(**measured(came, results, names))
    return unscaled, agreed(signal, axis_name)


def update(policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
    """Return the state after a step: float32, int32 and int32 arrays.

    Raises:
        GradientError: If `signal` is not a `Signal`, or its flag is not boolean.

    Example:
        >>> import lossscale, lossscale.jax as ls
        >>> policy = lossscale.Dynamic()
        >>> ls.update(policy, ls.init(policy), lossscale.Signal(finite=False)).scale
        Array(32768., dtype=float32)
    """
    require_signal(signal)
    if isinstance(state.scale, (jax.Array, np.ndarray, np.generic)):
        before = _strong(state)
    else:
        before = init(policy, state)  # a policy's own first state: Python numbers
    finite = leaves.flags(signal.finite)
    if finite.shape not in ((), before.scale.shape):
        message = (
            "finite must be one boolean, or one for each scale, got "
            f"{format_value(signal.finite)}. Use the signal that unscale returns."
        )
        raise GradientError(message)
    after = policy.step(before, signal._replace(finite=finite), where=jnp.where)
    return _strong(after)


def _strong(state: ScaleState) -> ScaleState:
    """Return a state as arrays whose types no step changes."""
    return ScaleState(
        jnp.asarray(state.scale, jnp.float32),
        jnp.asarray(state.good_steps, jnp.int32),
        jnp.asarray(state.bad_steps, jnp.int32),
    )


def _within_float32(number: float) -> float:
    """Return a Python number; beyond float32, where Python may refuse, infinity."""
    if number > validation.FLOAT32_MAX:
        return float("inf")
    return float("-inf") if number < -validation.FLOAT32_MAX else float(number)
