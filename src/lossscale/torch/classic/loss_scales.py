# SPDX-License-Identifier: Apache-2.0
"""The classic managers and loss scales on torch: the core's bodies with tensors.

They are no modules: `module.half()` would round the scale. Each has `state_dict` and
`load_state_dict`, as optimizers and schedulers do, and can be copied and pickled.
"""

from collections.abc import Mapping
from typing import Any

from lossscale.core import classic
from lossscale.core.classic import LossScale
from lossscale.torch.classic.binding import BINDING, check_keys


class _Fixed:
    """What is saved of a class that never changes: nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return an empty dict: there is nothing that a step changes."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take an empty dict.

        Raises:
            StateError: For any other, such as a dynamic loss scale's.
        """
        check_keys(state_dict, {})


class _Moving:
    """What is saved of a class that moves: its scale and its counters."""

    _state_variables: Any
    _policy: Any

    def state_dict(self) -> dict[str, float]:
        """Return the current state as Python numbers; on a GPU this waits for it.

        The constructor's arguments are not in it.
        """
        saved: dict[str, float] = self._state_variables.state_dict()
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: If it is malformed or foreign; then nothing has changed.
        """
        self._state_variables.load_state_dict(self._policy, state_dict)


class FixedLossScaleManager(_Fixed, classic.FixedLossScaleManager):
    """A manager whose loss scale never changes.

    Example:
        >>> import lossscale.torch.classic as ls
        >>> ls.FixedLossScaleManager(128.0).get_loss_scale()
        tensor(128.)
    """

    _binding = BINDING


class ExponentialUpdateLossScaleManager(
    _Moving, classic.ExponentialUpdateLossScaleManager
):
    """A manager that grows after finite steps in a row and shrinks after overflows.

    Example:
        >>> import lossscale.torch.classic as ls
        >>> manager = ls.ExponentialUpdateLossScaleManager(8.0, incr_every_n_steps=1)
        >>> manager.update_loss_scale(True)
        >>> manager.get_loss_scale()
        tensor(16.)
        >>> manager.state_dict()
        {'loss_scale': 16.0, 'good_steps': 0, 'bad_steps': 0}
    """

    _binding = BINDING


class FixedLossScale(_Fixed, classic.FixedLossScale):
    """A loss scale that never changes.

    Example:
        >>> import lossscale.torch.classic as ls
        >>> ls.FixedLossScale(8)()
        tensor(8.)
    """

    _binding = BINDING


class DynamicLossScale(_Moving, classic.DynamicLossScale):
    """A loss scale that doubles after finite steps and halves after an overflow.

    Example:
        >>> import torch, lossscale.torch.classic as ls
        >>> loss_scale = ls.DynamicLossScale(8, increment_period=1)
        >>> update_op, should_apply = loss_scale.update([torch.tensor([torch.inf])])
        >>> loss_scale(), bool(should_apply)
        (tensor(4.), False)
    """

    _binding = BINDING


def get(identifier: Any) -> LossScale | None:
    """Return the loss scale for a number, "dynamic", a LossScale or None.

    Raises:
        SettingError: For anything else (a ValueError).

    Example:
        >>> import lossscale.torch.classic as ls
        >>> ls.get(8)
        FixedLossScale(8.0)
    """
    return classic.get(identifier, FixedLossScale, DynamicLossScale)
