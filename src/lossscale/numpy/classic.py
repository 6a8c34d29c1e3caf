# SPDX-License-Identifier: Apache-2.0
"""The classic classes on NumPy: the core's bodies with NumPy's variables under them.

Everything happens at once, as in TensorFlow's eager mode.
"""

from typing import Any

import numpy as np

from lossscale.core import classic, trees
from lossscale.core.classic import LossScale
from lossscale.core.classic.arguments import real_number
from lossscale.core.policies import Policy
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.numpy import functional


class _StateVariables:
    """A state kept in this object; assigning happens at once."""

    def __init__(self, state: ScaleState, dtypes: tuple[str, str, str]) -> None:
        self._dtypes = dtypes
        self.assign(state)

    def read(self) -> ScaleState:
        return self._state

    def read_for_repr(self) -> ScaleState:
        return self._state

    def assign(self, state: ScaleState) -> None:
        values = zip(state, self._dtypes, strict=True)
        self._state = ScaleState(
            *(np.asarray(value, dtype=dtype)[()] for value, dtype in values)
        )


class _Binding(classic.EagerBinding):
    """What NumPy provides for the classic classes: everything happens at once."""

    def create_variables(
        self,
        owner: Any,
        state: ScaleState,
        scale: classic.Variable,
        good: classic.Variable,
        bad: classic.Variable | None,
    ) -> _StateVariables:
        del owner
        dtypes = scale.dtype, good.dtype, "int32" if bad is None else bad.dtype
        return _StateVariables(state, dtypes)

    def constant(self, value: float) -> Array:
        return np.float32(value)

    def as_scale(self, value: Any) -> Array:
        return np.float32(real_number("The loss scale", value))

    def flag(self, finite: Any) -> np.bool_:
        return functional.flag(finite)

    def all_finite(self, grads: Any) -> np.bool_:
        return functional.all_finite(trees.map_leaves(_widen, grads))

    def update(self, policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
        return functional.update(policy, state, signal)

    def scale_loss(self, loss: Any, loss_scale: Array) -> Any:
        return functional.scale(loss, ScaleState(loss_scale, 0, 0))

    def unscale(self, grads: list[Any], loss_scale: Array) -> list[Any]:
        unscaled, _ = functional.unscale(grads, ScaleState(loss_scale, 0, 0))
        return list(unscaled)


_BINDING = _Binding()


def _widen(path: str, leaf: Any) -> Any:
    """Return a gradient in float32 or wider, or raise if it is none."""
    return functional.upcast("gradient", path, leaf)


class FixedLossScaleManager(classic.FixedLossScaleManager):
    """A manager whose loss scale never changes.

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.FixedLossScaleManager(128.0).get_loss_scale()
        np.float32(128.0)
    """

    _binding = _BINDING


class ExponentialUpdateLossScaleManager(classic.ExponentialUpdateLossScaleManager):
    """A manager that grows after finite steps in a row and shrinks after overflows.

    Example:
        >>> import lossscale.numpy as ls
        >>> manager = ls.ExponentialUpdateLossScaleManager(8.0, incr_every_n_steps=1)
        >>> manager.update_loss_scale(True)
        >>> manager.get_loss_scale()
        np.float32(16.0)
    """

    _binding = _BINDING


class FixedLossScale(classic.FixedLossScale):
    """A loss scale that never changes.

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.FixedLossScale(8)()
        np.float32(8.0)
    """

    _binding = _BINDING


class DynamicLossScale(classic.DynamicLossScale):
    """A loss scale that doubles after finite steps and halves after an overflow.

    Example:
        >>> import numpy as np, lossscale.numpy as ls
        >>> loss_scale = ls.DynamicLossScale(8, increment_period=1)
        >>> update_op, should_apply = loss_scale.update([np.array([np.inf])])
        >>> loss_scale(), bool(should_apply)
        (np.float32(4.0), False)
    """

    _binding = _BINDING


class LossScaleOptimizer(classic.LossScaleOptimizer):
    """An optimizer that scales its loss and never applies non-finite gradients.

    The wrapped optimizer is any object with `compute_gradients(loss, var_list)` and
    `apply_gradients(grads_and_vars)`; NumPy has none of its own.

    Example:
        >>> import numpy as np, lossscale.numpy as ls
        >>> class Descent:
        ...     def compute_gradients(self, loss, var_list):  # of loss = 3 * weight
        ...         return [(3.0 * loss() / (3.0 * w), w) for w in var_list]
        ...     def apply_gradients(self, grads_and_vars):
        ...         for gradient, weight in grads_and_vars:
        ...             weight -= gradient
        >>> weight = np.array([5.0], dtype=np.float32)
        >>> optimizer = ls.LossScaleOptimizer(Descent(), 128)
        >>> optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])
        >>> weight
        array([2.], dtype=float32)
    """

    _binding = _BINDING
    _fixed_class = FixedLossScale
    _dynamic_class = DynamicLossScale

    def _can_be_applied(self, gradients: list[Any], variables: list[Any]) -> np.bool_:
        """Return whether the gradients are finite, and can be squared."""
        del variables
        checked = trees.map_leaves(_widen, gradients)
        return functional.all_finite_and_squarable(checked)[1]


def get(identifier: Any) -> LossScale | None:
    """Return the loss scale for a number, "dynamic", a LossScale or None.

    Raises:
        SettingError: For anything else (a ValueError).

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.get(8)
        FixedLossScale(8.0)
    """
    return classic.get(identifier, FixedLossScale, DynamicLossScale)
