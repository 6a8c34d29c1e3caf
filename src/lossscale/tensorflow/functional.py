# SPDX-License-Identifier: Apache-2.0
"""The functional API on tensors: eager, in graphs, in `tf.function`, under XLA.

    init(policy)                    the first state, as tensors
    scale(loss, state)              the loss times the scale, in float32
    unscale(grads, state)           the gradients divided by it, and a Signal
    update(policy, state, signal)   the state after the step
    select(finite, new, old)        the new values, or the old ones to skip a step

The rule is not restated here: `update` passes `tf.where` to the policy.

Losses and gradients are nested structures of dict, list, tuple and NamedTuple; `None`
passes through. Leaves are float16, bfloat16, float32 or float64 tensors,
`tf.IndexedSlices` (which stay sparse) or `tf.RaggedTensor`. Nothing here waits for a
device, except eagerly for sparse gradients.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from lossscale.core import trees, validation
from lossscale.core.headroom import largest_square
from lossscale.core.measurements import Measurement, check_measurements
from lossscale.core.policies import Policy, advance
from lossscale.core.portable import check_state
from lossscale.core.state import Array, ScaleState, Signal, list_dtypes
from lossscale.core.validation import format_value, require_signal
from lossscale.errors import GradientError, StructureError
from lossscale.tensorflow import gradient
from lossscale.tensorflow.measurements import measure as take_measurements
from lossscale.tensorflow.tracing import skip_autograph


@skip_autograph
def init(policy: Policy, state: ScaleState | None = None) -> ScaleState:
    """Return the first state of a policy, as float32, int32 and int32 tensors.

    Args:
        policy: Any policy.
        state: A state to go on from, such as one that `from_portable` returned.

    Raises:
        StateError: If the state is not one that the policy can go on from.

    Example:
        >>> import lossscale, lossscale.tensorflow as ls
        >>> float(ls.init(lossscale.Dynamic()).scale)
        65536.0
    """
    first = policy.init() if state is None else check_state(policy, state)
    pairs = zip(first, list_dtypes(first), strict=True)
    return type(first)(*(tf.constant(value, dtype) for value, dtype in pairs))


@skip_autograph
def scale(loss: Any, state: ScaleState) -> Any:
    """Return the loss times the scale, in float32 (float64 stays float64).

    A float16 loss is cast first: 65504 is float16's largest number.

    Raises:
        GradientError: If a loss is not a floating-point number.

    Example:
        >>> import tensorflow as tf, lossscale, lossscale.tensorflow as ls
        >>> float(ls.scale(tf.constant(2.0), ls.init(lossscale.Fixed(1024.0))))
        2048.0
    """
    if tf.is_tensor(loss):
        return _scale_leaf(state.scale, "", loss)
    return trees.map_leaves(partial(_scale_leaf, state.scale), loss)


@skip_autograph
def unscale(
    grads: Any, state: ScaleState, *, measure: Measurement | Iterable[Measurement] = ()
) -> tuple[Any, Signal]:
    """Multiply gradients by 1 / scale, and say whether all of them are finite.

    float16 and bfloat16 gradients become float32, where small ones do not vanish
    again; float64 stays float64. `Signal.finite` is about the result: an infinity
    stays one when it is unscaled, and a finite gradient may become one. A gradient that
    is finite and cannot be squared, as most optimizers do, is `Signal.too_large`:
    `finite` is False, and `update` leaves the scale.

    Args:
        grads: A nested structure of scaled gradients.
        state: The state whose scale was used for the loss.
        measure: Further fields of the `Signal` to fill, any of "nan", "amax", "norm",
            "zero_fraction" and "subnormal_fraction", and an `AboveEdge`.

    Raises:
        GradientError: If a gradient is not floating-point.

    Example:
        >>> import tensorflow as tf, lossscale, lossscale.tensorflow as ls
        >>> state = ls.init(lossscale.Fixed(4.0))
        >>> grads, signal = ls.unscale({"w": tf.constant([8.0, 4.0])}, state)
        >>> grads["w"].numpy().tolist(), bool(signal.finite)
        ([2.0, 1.0], True)
    """
    names = check_measurements(measure)
    scaled = trees.map_leaves(partial(gradient.validate_leaf, "gradient"), grads)
    inverse = invert(state.scale)
    unscaled = trees.map_leaves(
        lambda _, leaf: gradient.multiply(leaf, inverse), scaled
    )
    finite, squarable = _all_finite_and_squarable(unscaled)
    too_large = tf.logical_and(finite, tf.logical_not(squarable))
    signal = Signal(finite=squarable, too_large=too_large)
    if names:
        signal = signal._replace(**take_measurements(scaled, unscaled, names))
    return unscaled, signal


@skip_autograph
def update(policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
    """Return the state after a step; its tensors keep their dtypes.

    Raises:
        GradientError: If `signal` is not a `Signal`, or its flag is not boolean.

    Example:
        >>> import lossscale, lossscale.tensorflow as ls
        >>> policy = lossscale.Dynamic()
        >>> state = ls.update(policy, ls.init(policy), lossscale.Signal(finite=False))
        >>> float(state.scale)
        32768.0
    """
    require_signal(signal)
    if not tf.is_tensor(state.scale):
        state = init(policy, state)  # a policy's own first state: Python numbers
    before = type(state)(*map(tf.convert_to_tensor, state))
    finite = _to_flags(signal.finite)
    if not any(map(finite.shape.is_compatible_with, ((), before.scale.shape))):
        message = (
            "finite must be one boolean, or one for each scale, got "
            f"{format_value(signal.finite)}. Use the signal that unscale returns."
        )
        raise GradientError(message)
    flags = signal._replace(finite=finite)
    if flags.too_large is not None:
        flags = flags._replace(too_large=_to_flags(flags.too_large))
    if flags.amax is not None:
        flags = flags._replace(amax=saturate(flags.amax))
    if flags.above_edge is not None:
        flags = flags._replace(above_edge=saturate(flags.above_edge))
    after = advance(policy, before, flags, where=_where)
    pairs = zip(after, before, strict=True)
    return type(before)(*(tf.cast(new, old.dtype) for new, old in pairs))


def saturate(amax: Any) -> tf.Tensor:
    """Return a magnitude in float32; one beyond it as its largest number."""
    amax_tensor = tf.convert_to_tensor(amax)
    largest = tf.constant(validation.FLOAT32_MAX, amax_tensor.dtype)
    return tf.cast(tf.minimum(amax_tensor, largest), tf.float32)


@skip_autograph
def select(finite: Any, new: Any, old: Any) -> Any:
    """Return `new` if the step was finite, else `old`.

    Args:
        finite: One boolean: `signal.finite`, not the signal.
        new: A nested structure of tensors.
        old: A structure of the same shape.

    Raises:
        GradientError: If `finite` is anything but one boolean.
        StructureError: If the two structures differ.

    Example:
        >>> import tensorflow as tf, lossscale.tensorflow as ls
        >>> new, old = {"step": tf.constant(7)}, {"step": tf.constant(6)}
        >>> int(ls.select(False, new, old)["step"])
        6
    """
    applied = to_flag(finite)
    trees.check_same_structure(new, old)
    old_leaves = dict(trees.leaves(old))
    return trees.map_leaves(
        lambda path, leaf: _choose(path, applied, leaf, old_leaves[path]), new
    )


def _scale_leaf(loss_scale: Array, path: str, leaf: Any) -> Any:
    # A backward pass starts from a plain 1; an integer tensor is a mistake.
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        leaf = tf.constant(leaf, tf.float32)
    return gradient.multiply(gradient.validate_leaf("loss", path, leaf), loss_scale)


def invert(loss_scale: Array) -> Array:
    """Return 1 / scale; NaN, which skips the step, for a scale above 2**126.

    The reciprocal of such a scale is subnormal, and TensorFlow takes it for zero: every
    gradient would be 0, every step finite, and the scale would never fall.
    """
    divisor = tf.convert_to_tensor(loss_scale, tf.float32)
    is_too_large = tf.logical_not(divisor <= 2.0**126)
    return tf.where(is_too_large, float("nan"), 1.0 / divisor)


def to_flag(finite: Any) -> Array:
    """Return one flag as a boolean scalar tensor; anything else is an error."""
    flags = _to_flags(finite)
    if flags.shape.num_elements() not in (1, None):
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    return flags if flags.shape.rank == 0 else tf.reshape(flags, ())


def all_true(flags: Iterable[Array]) -> Array:
    """Return whether all of some boolean scalars are true; none at all are."""
    scalars = list(flags)
    return tf.reduce_all(tf.stack(scalars)) if scalars else tf.constant(True)


def _all_finite_and_squarable(grads: Any) -> tuple[Array, Array]:
    """Return whether all numbers are finite, and whether their squares are too."""
    finite, squarable = [], []
    for _, leaf in trees.leaves(grads):
        magnitude = gradient.largest_magnitude(leaf)
        bound = largest_square(gradient.dtype_name(leaf))
        finite.append(tf.math.is_finite(magnitude))
        if isinstance(leaf, tf.IndexedSlices):  # rows of one index are added up
            within = gradient.is_within(leaf, bound, gradient.dtype_name(leaf))
            squarable.append(within)
        else:
            squarable.append(magnitude <= bound)
    return all_true(finite), all_true(squarable)


def _to_flags(finite: Any) -> Array:
    """Return flags as a boolean tensor, or raise.

    A step that is taken for finite by mistake is applied. So NaN, infinity, None, text
    and a whole `Signal`, which have a truth value in Python, are errors here.
    """
    tensor: Any = None
    if not isinstance(finite, (Signal, str, bytes, type(None))):
        try:
            tensor = tf.convert_to_tensor(finite)
        except (TypeError, ValueError):
            tensor = None
    is_number = tensor is not None and (
        tensor.dtype.is_bool or tensor.dtype.is_integer or tensor.dtype.is_floating
    )
    if not is_number or (not tf.is_tensor(finite) and not _is_finite(tensor)):
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    if tensor.dtype.is_bool:
        return tensor
    number = tf.cast(tensor, tf.float64)
    # NaN or infinity that is known only when the graph runs counts as not finite.
    # tf.not_equal and not !=, which compares objects in a graph of TensorFlow 1.
    return tf.logical_and(tf.not_equal(number, 0), tf.math.is_finite(number))


def _is_finite(constant: Array) -> bool:
    """Whether every number of a constant is finite, also of that of a graph."""
    if not constant.dtype.is_floating:
        return True
    values = tf.get_static_value(constant)
    return bool((abs(values) <= constant.dtype.max).all())  # NaN is not


def _where(condition: Array, first: Array, second: Array) -> Array:
    """Select as `tf.where` does; a Python number takes the dtype of the other."""
    if tf.is_tensor(first):
        return tf.where(condition, first, tf.cast(second, first.dtype))
    if tf.is_tensor(second):
        return tf.where(condition, tf.cast(first, second.dtype), second)
    return tf.where(condition, first, second)


def _choose(path: str, applied: Array, new: Any, old: Any) -> Any:
    """Return one of two leaves; the other's NaN does not matter."""
    if isinstance(new, (tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)):
        if tf.executing_eagerly():
            return new if bool(applied) else old
        return tf.cond(applied, lambda: new, lambda: old)
    new, old = tf.convert_to_tensor(new), tf.convert_to_tensor(old)
    if new.dtype != old.dtype or not new.shape.is_compatible_with(old.shape):
        message = (
            f"The two leaves at {path or 'the top'} differ: {new.dtype.name} "
            f"{new.shape} against {old.dtype.name} {old.shape}."
        )
        raise StructureError(message)
    return tf.where(applied, new, old)
