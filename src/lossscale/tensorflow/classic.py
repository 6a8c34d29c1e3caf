# SPDX-License-Identifier: Apache-2.0
"""The classic managers and loss scales on TensorFlow: the core's bodies with variables.

Their checkpoints have the keys of the originals (`current_loss_scale`, `good_steps`),
so that either reads what the other wrote.
"""

from abc import ABCMeta
from typing import Any, cast

import tensorflow as tf

from lossscale.core import classic
from lossscale.tensorflow.binding import BINDING
from lossscale.tensorflow.tracing import skip_autograph_in


class _ModuleMeta(ABCMeta, type(tf.Module)):  # type: ignore[misc]
    """Both metaclasses: abstract methods, and a module's own."""


class _Module(tf.Module, metaclass=_ModuleMeta):
    """A module: checkpoints and saved models find its variables."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """Prepare the module here: a user's subclass need not call `__init__`."""
        del arguments, keywords
        module = super().__new__(cls)
        tf.Module.__init__(module)
        return module


class LossScaleManager(classic.LossScaleManager, _Module):
    """Decides the loss scale of every step. Subclass it for a strategy of your own.

    Variables that a subclass keeps in attributes are checkpointed with it.

    Example:
        >>> import tensorflow as tf, lossscale.tensorflow as ls
        >>> class Halving(ls.LossScaleManager):
        ...     def __init__(self):
        ...         self.value = tf.Variable(1024.0, trainable=False)
        ...     def get_loss_scale(self):
        ...         return tf.convert_to_tensor(self.value)
        ...     def update_loss_scale(self, finite_grads):
        ...         kept = tf.where(finite_grads, self.value, self.value / 2)
        ...         self.value.assign(kept)
        >>> manager = Halving()
        >>> manager.update_loss_scale(tf.constant(False))
        >>> float(manager.get_loss_scale())
        512.0
    """


class LossScale(classic.LossScale, _Module):
    """A loss scale that can be called for its value and updated from gradients.

    Subclass it for a strategy of your own; an optimizer applies the gradients if
    `update` says so. Variables that a subclass keeps in attributes are checkpointed
    with it.

    Example:
        >>> import lossscale.tensorflow as ls
        >>> isinstance(ls.DynamicLossScale(), ls.LossScale)
        True
    """


@skip_autograph_in("get_loss_scale", "update_loss_scale")
class FixedLossScaleManager(classic.FixedLossScaleManager, LossScaleManager):
    """A manager whose loss scale never changes.

    Example:
        >>> import lossscale.tensorflow as ls
        >>> float(ls.FixedLossScaleManager(128.0).get_loss_scale())
        128.0
    """

    _binding = BINDING


@skip_autograph_in("get_loss_scale", "update_loss_scale")
class ExponentialUpdateLossScaleManager(
    classic.ExponentialUpdateLossScaleManager, LossScaleManager
):
    """A manager that grows after finite steps in a row and shrinks after overflows.

    It keeps three variables, `loss_scale`, `good_steps` and `bad_steps`.

    Example:
        >>> import lossscale.tensorflow as ls
        >>> manager = ls.ExponentialUpdateLossScaleManager(8.0, incr_every_n_steps=1)
        >>> manager.update_loss_scale(True)
        >>> float(manager.get_loss_scale())
        16.0
    """

    _binding = BINDING


@skip_autograph_in("__call__", "update", "update_from_finite")
class FixedLossScale(classic.FixedLossScale, LossScale):
    """A loss scale that never changes.

    Example:
        >>> import lossscale.tensorflow as ls
        >>> float(ls.FixedLossScale(8)())
        8.0
    """

    _binding = BINDING


@skip_autograph_in("__call__", "update", "update_from_finite")
class DynamicLossScale(classic.DynamicLossScale, LossScale):
    """A loss scale that doubles after finite steps and halves after an overflow.

    It keeps two variables, `current_loss_scale` and `good_steps`.

    Example:
        >>> import tensorflow as tf, lossscale.tensorflow as ls
        >>> loss_scale = ls.DynamicLossScale(8, increment_period=1)
        >>> update_op, should_apply = loss_scale.update([tf.constant([float("inf")])])
        >>> float(loss_scale()), bool(should_apply)
        (4.0, False)
    """

    _binding = BINDING

    @property
    def _num_good_steps(self) -> Any:
        """The counter under the original's private name, which its users read."""
        return self.good_steps


def get(identifier: Any) -> LossScale | None:
    """Return the loss scale for a number, "dynamic", a LossScale or None.

    Raises:
        SettingError: For anything else (a ValueError).

    Example:
        >>> import lossscale.tensorflow as ls
        >>> ls.get(8)
        FixedLossScale(8.0)
    """
    loss_scale = classic.get(identifier, FixedLossScale, DynamicLossScale)
    return cast("LossScale | None", loss_scale)
