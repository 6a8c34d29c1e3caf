# SPDX-License-Identifier: Apache-2.0
"""Names of an optimizer's variables in graphs of TensorFlow 1: the originals' names.

`Saver` finds variables by name. The originals let the optimizer create its variables
inside `tf.cond`. With the control flow of TensorFlow 1 a variable is named after the
branch that it is created in (`cond_1/beta1_power`), with that of TensorFlow 2 it loses
the name scope around it. So the name depends on how often `tf.cond` was called before:

    DynamicLossScale                    updates in one branch, applies in the next
    ExponentialUpdateLossScaleManager   applies in one branch, updates in the next
    FixedLossScaleManager               applies in a branch
    FixedLossScale                      applies without a branch

The same names are reserved here, in the same order. For that, each `tf.cond` of this
adapter has a name of its own.
"""

from typing import Any

import tensorflow as tf

from lossscale.core import classic

_BRANCH = "cond"
"""The name that `tf.cond` has unless it is given another."""


def create_slots(opt: Any, variables: list[Any], loss_scale: Any) -> None:
    """Create the variables of an optimizer under the names that the originals gave."""
    is_from_tensorflow_1 = isinstance(opt, tf.compat.v1.train.Optimizer)
    if not is_from_tensorflow_1 or tf.inside_function():
        return  # a Saver is not used there
    if isinstance(loss_scale, classic.FixedLossScale):
        _create(opt, variables)
    elif not tf.compat.v1.control_flow_v2_enabled():
        if isinstance(loss_scale, classic.DynamicLossScale):
            _reserve_branch()
        with tf.name_scope(_BRANCH):
            _create(opt, variables)
        if isinstance(loss_scale, classic.ExponentialUpdateLossScaleManager):
            _reserve_branch()


def _create(opt: Any, variables: list[Any]) -> None:
    with tf.init_scope():
        opt._create_slots(variables)  # noqa: SLF001  # apply_gradients does the same


def _reserve_branch() -> None:
    """Use up the next name of a branch."""
    tf.compat.v1.get_default_graph().unique_name(_BRANCH)
