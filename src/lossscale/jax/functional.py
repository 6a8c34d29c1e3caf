# SPDX-License-Identifier: Apache-2.0
"""Functional API: pure functions over pytrees, for every transformation of JAX.

    init(policy)                    the first state, as strongly typed arrays
    scale(loss, state)              the loss times the scale, in float32
    unscale(grads, state)           the gradients divided by the scale, and a `Signal`
    update(policy, state, signal)   the state after the step
    select(finite, new, old)        the new values, or the old ones of a skipped step
    apply_if_finite(finite, ...)    `select` as a condition, which saves the work

The rule is in the core: `update` passes `jnp.where` to the policy.

The state is an argument and a result of a step; the policy is hashable and static.
Nothing is compiled again after the first step, and nothing waits for the host.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core import portable, validation
from lossscale.core.measurements import Measurement, check_measurements
from lossscale.core.policies import Dynamic, Policy, advance, require_policy
from lossscale.core.state import Array, ScaleState, Signal, list_dtypes
from lossscale.core.validation import format_value, require_signal
from lossscale.errors import GradientError
from lossscale.jax import gradient, selection
from lossscale.jax.arguments import check_state, to_flag, to_flags
from lossscale.jax.consensus import count_devices, reduce_signal
from lossscale.jax.gradient import is_overwrite_with_gradient
from lossscale.jax.measurements import measure as compute_measurements
from lossscale.jax.types import AxisName, KeyPath, LeafPredicate, PyTree

State = TypeVar("State")


def init(
    policy: Policy,
    state: ScaleState | None = None,
    *,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> ScaleState:
    """Return the first state of a policy, as float32, int32 and int32 arrays.

    Args:
        policy: Any policy.
        state: A state to continue from, such as one that `from_portable` returned. A
            scale above the policy's `max_scale`, as another library's may be, is
            lowered to it: finite steps would leave it where it is.
        device: Where its arrays are placed: a device or a sharding. A step over a mesh
            returns its state on the whole mesh; a state that starts there too, with
            `NamedSharding(mesh, PartitionSpec())`, is not compiled a second time.

    Raises:
        SettingTypeError: If `policy` is not a policy.
        StateError: If the policy cannot continue from the state.

    Example:
        >>> import lossscale, lossscale.jax as ls
        >>> ls.init(lossscale.Dynamic()).scale
        Array(65536., dtype=float32)
    """
    require_policy(policy)
    first = policy.init() if state is None else portable.check_state(policy, state)
    if isinstance(policy, Dynamic):
        first = first._replace(scale=min(first.scale, policy.max_scale))
    arrays = _to_arrays(first)
    return arrays if device is None else jax.device_put(arrays, device)


def scale(loss: PyTree, state: ScaleState) -> PyTree:
    """Return the loss times the scale, in float32 (float64 stays float64).

    A float16 loss is upcast first: 65504 is float16's largest number. Its gradient is
    still a float16 number, so scales above 65504 overflow there; return the loss in
    float32 where you can.

    Raises:
        GradientError: If a loss is not a real floating-point number.
        StateError: If `state` is not a `ScaleState`.

    Example:
        >>> import jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> ls.scale(jnp.float16(2.0), ls.init(lossscale.Fixed(1024.0)))
        Array(2048., dtype=float32)
    """
    check_state(state)
    factor = jnp.asarray(state.scale, jnp.float32)

    def multiply(path: KeyPath, leaf: Any) -> jax.Array:
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            leaf = jnp.asarray(_saturate_to_float32(leaf), jnp.float32)
        value = gradient.upcast(gradient.validate_leaf("loss", path, leaf))
        if jnp.iscomplexobj(value):
            location = jax.tree_util.keystr(path)
            message = (
                f"The loss{' at ' + location if location else ''} is {value.dtype}, "
                "expected a real floating-point number. Use its real part or its "
                "magnitude."
            )
            raise GradientError(message)
        return gradient.multiply(value, factor)

    return jax.tree_util.tree_map_with_path(multiply, loss)


def unscale(
    grads: PyTree,
    state: ScaleState,
    *,
    measure: Measurement | Iterable[Measurement] = (),
    axis_name: AxisName = None,
    passthrough: LeafPredicate = is_overwrite_with_gradient,
    loss: PyTree = None,
) -> tuple[PyTree, Signal]:
    """Multiply gradients by 1 / scale and check whether all of them are finite.

    float16, bfloat16 and float8 gradients become float32, where small ones do not
    vanish again; float64 stays float64. `Signal.finite` is about the result: an
    infinity stays infinite when it is unscaled, and a finite gradient may become
    infinite. A gradient that is finite and cannot be squared, as most optimizers do, is
    `Signal.too_large`: `finite` is False, and `update` leaves the scale. A complex
    gradient counts as two numbers.

    Args:
        grads: A pytree of scaled gradients. `None` and `float0` leaves pass through.
        state: The state whose scale multiplied the loss.
        measure: Further fields of the `Signal` to fill, any of "nan", "amax", "norm",
            "zero_fraction" and "subnormal_fraction", and an `AboveEdge`.
        axis_name: Inside `shard_map`, `pmap` or `vmap`: the axis, or a tuple of axes,
            whose devices make one decision. The gradients are not reduced: average them
            yourself, before or after. A gradient that cannot be squared after all
            devices have been summed is too large. Without such an axis, as in `jit`
            with sharded arrays, leave it out: every result is global there.
        passthrough: Decides by key path and leaf which leaves pass through, neither
            unscaled nor checked; by default the state of float8 layers.
        loss: The loss before it was scaled, to fill `Signal.loss_finite`.

    Raises:
        GradientError: If a gradient is not floating-point.
        StateError: If `state` is not a `ScaleState`.

    Example:
        >>> import jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> state = ls.init(lossscale.Fixed(4.0))
        >>> grads, signal = ls.unscale({"w": jnp.array([8.0, 4.0])}, state)
        >>> grads, bool(signal.finite)
        ({'w': Array([2., 1.], dtype=float32)}, True)
    """
    names = check_measurements(measure)
    unscaled, signal = unscale_locally(
        grads,
        state,
        passthrough=passthrough,
        loss=loss,
        names=names,
        divisor=count_devices(axis_name),
    )
    return unscaled, reduce_signal(signal, axis_name)


def unscale_locally(
    grads: PyTree,
    state: ScaleState,
    *,
    passthrough: LeafPredicate,
    loss: PyTree,
    names: frozenset[Measurement] = frozenset(),
    divisor: int = 1,
) -> tuple[PyTree, Signal]:
    """Unscale gradients and check them, without a reduction over devices.

    Args:
        grads: A pytree of scaled gradients.
        state: The state whose scale multiplied the loss.
        passthrough: Decides which leaves pass through.
        loss: The loss before it was scaled, or `None`.
        names: What to measure.
        divisor: Divides the largest number that counts as squarable.
    """
    check_state(state)
    inverse = 1.0 / jnp.asarray(state.scale, jnp.float32)
    # The reciprocal of an infinite scale is 0, and so is that of a scale above 2**126
    # where subnormal numbers are flushed to zero: every gradient would be 0 and every
    # step finite. NaN makes the step an overflow, which lowers the scale.
    inverse = jnp.where(inverse == 0, jnp.nan, inverse)
    unscaled, results = gradient.map_gradients(
        lambda leaf: gradient.multiply(gradient.upcast(leaf), inverse),
        grads,
        passthrough,
    )
    signal = make_signal(results, divisor)
    if loss is not None:
        flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(loss)]
        signal = signal._replace(loss_finite=gradient.all_true(flags))
    if names:
        scaled = [leaf for _, leaf in gradient.list_gradients(grads, passthrough)]
        signal = signal._replace(**compute_measurements(scaled, results, names))
    return unscaled, signal


def make_signal(unscaled: list[jax.Array], divisor: int = 1) -> Signal:
    """Check unscaled gradients and return the signal; see `gradient.check_gradients`.

    Args:
        unscaled: Unscaled gradients.
        divisor: Divides the largest number that counts as squarable.
    """
    finite, squarable = gradient.check_gradients(unscaled, divisor)
    return Signal(finite=squarable, too_large=finite & ~squarable)


def update(policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
    """Return the state after a step: float32, int32 and int32 arrays.

    Raises:
        GradientError: If `signal` is not a `Signal`, or its flag is not boolean.
        StateError: If `state` is not a `ScaleState`.

    Example:
        >>> import lossscale, lossscale.jax as ls
        >>> policy = lossscale.Dynamic()
        >>> ls.update(policy, ls.init(policy), lossscale.Signal(finite=False)).scale
        Array(32768., dtype=float32)
    """
    require_signal(signal)
    check_state(state)
    if isinstance(state.scale, (jax.Array, np.ndarray, np.generic)):
        before = _to_arrays(state)
    else:
        before = init(policy, state)  # a policy's own first state: Python numbers
    finite = to_flags(signal.finite)
    if finite.shape not in ((), before.scale.shape):
        message = (
            "finite must be one boolean, or one for each scale, got "
            f"{format_value(signal.finite)}. Use the signal that unscale returns."
        )
        raise GradientError(message)
    flags = signal._replace(finite=finite)
    if signal.too_large is not None:
        flags = flags._replace(too_large=to_flags(signal.too_large))
    if signal.amax is not None:
        flags = flags._replace(amax=_saturate_magnitude(signal.amax))
    return _to_arrays(advance(policy, before, flags, where=jnp.where))


def select(finite: Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new` if the step was finite, else `old`: for a whole train state.

    Include everything that belongs to an applied step: parameters, optimizer state,
    batch statistics, moving averages, the step count. A number that is infinite or NaN
    in `new` keeps the value of `old`. A leaf that is the same object in both trees is
    returned, whatever its type; functions, texts and other leaves that are no arrays
    must be equal. With a Python boolean one of the two trees is returned unchanged.

    Both trees are computed. `apply_if_finite` saves the work of a skipped step.

    Args:
        finite: One boolean: `signal.finite`, not the signal.
        new: A pytree.
        old: A pytree of the same structure, with the same shapes and dtypes.

    Raises:
        GradientError: If `finite` is anything but one boolean.
        StructureError: If the two trees differ in structure, if two leaves differ in
            dtype or shape, or if both trees contain the very same arrays.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> new, old = {"step": jnp.int32(7)}, {"step": jnp.int32(6)}
        >>> ls.select(jnp.bool_(False), new, old)
        {'step': Array(6, dtype=int32)}
    """
    applied = to_flag(finite)
    selection.check_same_structure(new, old)
    if isinstance(finite, (bool, np.bool_)):
        selection.check_array_types(new, old)
        return new if finite else old
    selection.check_distinct_arrays(new, old)
    return selection.select_leaves(applied, new, old)


def apply_if_finite(
    finite: Array, function: Callable[..., State], old: State, *operands: PyTree
) -> State:
    """Return `function(old, *operands)` if the step was finite, else `old`.

    This is `lax.cond`: the function does not run on a skipped step, except under
    `vmap`, where JAX computes both branches. It takes the train state and returns the
    next one, of the same structure, shapes and dtypes. A number that is infinite or NaN
    in the result keeps the value of `old`. Pass gradients as operands: JAX cannot
    reuse the buffers that a function closes over.

    Args:
        finite: One boolean: `signal.finite`, not the signal.
        function: Computes the new state from the old one and the operands.
        old: The state before the step: a pytree of arrays.
        *operands: Further arguments of the function, such as the gradients.

    Raises:
        GradientError: If `finite` is anything but one boolean.
        TypeError: JAX's own, if the function returns another type of state.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> def step(weight, gradient):
        ...     return weight - gradient
        >>> weight, gradient = jnp.float32(3.0), jnp.float32(1.0)
        >>> ls.apply_if_finite(jnp.bool_(True), step, weight, gradient)
        Array(2., dtype=float32)
    """

    def apply(state: State, *arguments: PyTree) -> State:
        new = function(state, *arguments)
        if not selection.has_same_structure(new, state):
            return new  # lax.cond raises an error that explains it
        selected: State = selection.keep_finite(new, state)
        return selected

    def skip(state: State, *unused: PyTree) -> State:
        del unused
        return state

    result: State = jax.lax.cond(to_flag(finite), apply, skip, old, *operands)
    return result


def _to_arrays(state: ScaleState) -> ScaleState:
    """Return a state as strongly typed arrays, whose dtypes no step changes."""
    pairs = zip(state, list_dtypes(state), strict=True)
    return type(state)(*(jnp.asarray(value, dtype) for value, dtype in pairs))


def _saturate_magnitude(amax: Array) -> jax.Array:
    """Return a magnitude in float32; one beyond it as its largest number."""
    return jnp.minimum(jnp.asarray(amax), validation.FLOAT32_MAX).astype(jnp.float32)


def _saturate_to_float32(number: float) -> float:
    """Return a Python number; infinity if it exceeds float32, which JAX may refuse."""
    if number > validation.FLOAT32_MAX:
        return float("inf")
    return float("-inf") if number < -validation.FLOAT32_MAX else float(number)
