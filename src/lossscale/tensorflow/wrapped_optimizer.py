# SPDX-License-Identifier: Apache-2.0
"""Optimizers to wrap: TensorFlow 1's, and Keras's of either generation.

TensorFlow 1's compute gradients and count steps in a `global_step` they are given.
Keras's (Keras 3, tf_keras and its legacy ones) take gradients from a tape and count
in `iterations`. These functions treat both alike.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale.errors import ContextError, SettingError

_SCALING = frozenset(
    {
        "LossScaleOptimizer",
        "BaseLossScaleOptimizer",
        "LossScaleOptimizerV3",
        "MixedPrecisionLossScaleOptimizer",
    }
)
"""Classes that scale the loss, by name."""

_LIBRARIES = frozenset({"keras", "tf_keras", "tensorflow", "lossscale"})
"""Where a name in this set must come from."""

_MARK = "_is_wrapped_by_loss_scale_optimizer"
"""The attribute by which tf_keras, too, marks an optimizer that is wrapped."""


def check_optimizer(opt: Any) -> None:
    """Raise unless an object is an optimizer that can be wrapped."""
    method = "apply_gradients" if is_keras(opt) else "compute_gradients"
    if isinstance(opt, type) or not callable(getattr(opt, method, None)):
        message = (
            "opt must be an optimizer of tf.compat.v1.train, Keras or tf_keras, got "
            f"{opt!r}."
        )
        raise SettingError(message)
    _check_scales_nothing(opt)
    if getattr(opt, "gradient_transformers", None):
        message = (
            "opt was made with gradient_transformers, which change the gradients after "
            "the check for non-finite ones. Change them before apply_gradients instead."
        )
        raise SettingError(message)


def _check_scales_nothing(opt: Any) -> None:
    """Raise if an optimizer scales its loss already, or is wrapped already."""
    names = (
        (kind.__module__.partition(".")[0], kind.__name__) for kind in type(opt).__mro__
    )
    if any(library in _LIBRARIES and name in _SCALING for library, name in names):
        message = (
            f"opt is a {type(opt).__name__}, which scales its loss already. Wrap the "
            "optimizer inside it."
        )
        raise SettingError(message)
    if getattr(opt, _MARK, False):
        message = (
            f"This {type(opt).__name__} is already wrapped by a LossScaleOptimizer. "
            "Make a new optimizer for each wrapper."
        )
        raise SettingError(message)
    if getattr(opt, "loss_scale_factor", None) is not None:
        message = (
            f"opt has loss_scale_factor={opt.loss_scale_factor!r} and would divide the "
            "gradients once more. Set it to None; this wrapper scales the loss."
        )
        raise SettingError(message)


def mark_as_wrapped(opt: Any) -> None:
    """Mark an optimizer as wrapped, so that it is not wrapped once more."""
    with contextlib.suppress(AttributeError):  # a user's optimizer, with __slots__
        object.__setattr__(opt, _MARK, True)


def aggregate_gradients(
    opt: Any, pairs: list[tuple[Any, Any]], keywords: dict[str, Any]
) -> tuple[list[tuple[Any, Any]], dict[str, Any]]:
    """Call the `gradient_aggregator` of a legacy optimizer, if it was given one.

    Its result is checked, and applied without being aggregated once more.
    """
    aggregator = getattr(opt, "gradient_aggregator", None)
    is_default = getattr(aggregator, "__name__", None) == "all_reduce_sum_gradients"
    name = "experimental_aggregate_gradients"
    if aggregator is None or is_default or not keywords.get(name, True):
        return pairs, keywords
    return list(aggregator(pairs)), keywords | {name: False}


def is_step_counter_of_tf_keras(global_step: Any) -> bool:
    """Whether a counter belongs to tf_keras's adapter for optimizers of TensorFlow 1.

    `compile` wraps them in one, whose `minimize` uses a tape of its own.
    """
    return str(getattr(global_step, "name", "")).startswith("TFOptimizer/")


def is_keras(opt: Any) -> bool:
    """Whether an optimizer counts its own steps, as all of Keras's do."""
    # Of the class: to ask a legacy optimizer for the attribute creates the variable.
    return hasattr(type(opt), "iterations") or "iterations" in getattr(
        opt, "__dict__", ()
    )


def get_name(opt: Any) -> str:
    """Return the name of an optimizer."""
    getter = getattr(opt, "get_name", None)
    return str(getter() if callable(getter) else getattr(opt, "name", "LossScale"))


def list_variables(opt: Any) -> list[Any]:
    """List the variables of an optimizer; some have a method, some a list."""
    variables = getattr(opt, "variables", [])
    return list(variables() if callable(variables) else variables)


def create_variables(opt: Any, var_list: list[Any]) -> None:
    """Create the optimizer's variables now: the branch of a `tf.cond` is too late.

    Raises:
        ContextError: In a graph of TensorFlow 1, if the optimizer does not work there.
    """
    if not is_keras(opt):
        return  # TensorFlow 1's lift their variables out of any branch
    is_legacy = callable(getattr(opt, "_create_all_weights", None))
    with tf.init_scope():
        if not is_legacy and not tf.executing_eagerly():
            # No session runs its updates: the weights would never change.
            message = (
                f"A {type(opt).__name__} of Keras does not work in a graph of "
                "TensorFlow 1. Use tf.function, or an optimizer of tf.compat.v1.train "
                "or tf_keras.optimizers.legacy."
            )
            raise ContextError(message)
        if is_legacy:
            opt._create_all_weights(var_list)  # noqa: SLF001
        elif not getattr(opt, "built", False) and not getattr(opt, "_built", False):
            opt.build(var_list)


def compute_gradients_by_tape(
    loss: Callable[[], Any], var_list: Any, tape: Any = None, grad_loss: Any = None
) -> list[tuple[Any, Any]]:
    """Return pairs of gradient and variable of a loss, by a tape.

    Args:
        loss: Returns the loss; the tape records it.
        var_list: The variables, or a callable that returns them after the loss.
        tape: The tape that recorded the computation before `loss`, if there was any.
        grad_loss: The gradient of the loss, if it is not 1.
    """
    with tape or tf.GradientTape() as recording:
        value = loss()
    if var_list is None:
        var_list = recording.watched_variables()
    variables = list(var_list() if callable(var_list) else var_list)
    sources = [
        # A variable of Keras 3 holds one of TensorFlow.
        variable if isinstance(variable, tf.Variable) else variable.value
        for variable in variables
    ]
    gradients = recording.gradient(value, sources, output_gradients=grad_loss)
    return list(zip(gradients, variables, strict=True))


def count_step(counter: Any) -> Any:
    """Count a step that was skipped; returns an op in a graph."""
    return counter.assign_add(tf.constant(1, counter.dtype))
