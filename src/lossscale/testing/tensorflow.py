# SPDX-License-Identifier: Apache-2.0
"""`inject` for TensorFlow: tensors with a fault at given steps, or in a gradient."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from lossscale.core import trees
from lossscale.core.state import Array
from lossscale.core.validation import check_choice
from lossscale.testing.faults import Fault, FaultValue, check_name


def inject(
    tensors: Any,
    name: str,
    value: FaultValue,
    *,
    step: Array,
    steps: int | Iterable[int],
    where: str = "value",
    element: int | None = 0,
) -> Any:
    """Return the same tensors, and at given steps one of them with a fault.

    Works eagerly, in `tf.function`, where `step` is a tensor, and under XLA.

    Args:
        tensors: Any nesting of dict, list and tuple; gradients from a tape, or values
            in a forward pass. `tf.IndexedSlices` stay sparse.
        name: Which tensor, by its path: `"['kernel']"`, or `"[0]"` in a list; `""` if
            there is one tensor alone.
        value: "inf", "-inf", "nan", "huge" (the largest finite number) or a number.
        step: Which step this is: a number, a tensor or a variable.
        steps: The steps at which the fault is written, from 1.
        where: "value" writes into the tensor. "gradient" leaves it, and writes into its
            gradient in the backward pass: into the scaled gradient, if the loss is
            scaled.
        element: Which number of the tensor, counted row by row; `None` for all.

    Raises:
        SettingError: If there is no such tensor, element, step or fault.
        SettingTypeError: If the tensor is not floating-point.

    Example:
        >>> import tensorflow as tf
        >>> from lossscale.testing.tensorflow import inject
        >>> @tf.function
        ... def spoil(grads, step):
        ...     return inject(grads, "[0]", "inf", step=step, steps=2)
        >>> [spoil([tf.ones(2)], tf.constant(s))[0].numpy().tolist() for s in (1, 2)]
        [[1.0, 1.0], [inf, 1.0]]
    """
    fault = Fault.check(value, steps, element)
    check_choice("where", where, ("value", "gradient"))
    check_name(name, [path for path, _ in trees.leaves(tensors)], "tensors")
    hit = tf.reduce_any(tf.equal(tf.cast(step, tf.int64), fault.steps))

    def write(path: str, leaf: Array) -> Array:
        if path != name:
            return leaf
        if isinstance(leaf, tf.IndexedSlices):
            values = _write(leaf.values, hit, name, fault)
            return tf.IndexedSlices(values, leaf.indices, leaf.dense_shape)
        tensor = tf.convert_to_tensor(leaf)
        if where == "gradient":
            return _write_into_gradient(tensor, hit, name, fault)
        return _write(tensor, hit, name, fault)

    return trees.map_leaves(write, tensors)


def _write(tensor: Array, hit: Array, name: str, fault: Fault) -> Array:
    number = fault.number(name or "the tensor", tensor.dtype.name)
    if tensor.shape.is_fully_defined():
        fault.check_size(name or "the tensor", tensor.shape.num_elements())
    mask = tf.fill(tf.shape(tensor), hit)
    if fault.element is not None:
        chosen = tf.equal(tf.range(tf.size(tensor)), fault.element)
        mask &= tf.reshape(chosen, tf.shape(tensor))
    return tf.where(mask, tf.constant(number, tensor.dtype), tensor)


def _write_into_gradient(tensor: Array, hit: Array, name: str, fault: Fault) -> Array:
    @tf.custom_gradient
    def identity(inner: Array) -> tuple[Array, Any]:
        return tf.identity(inner), lambda grad: _write(grad, hit, name, fault)

    return identity(tensor)
