# SPDX-License-Identifier: Apache-2.0
"""`PolicyLossScale`: any policy as a loss scale of the classic optimizer wrapper."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lossscale.core import classic, trees
from lossscale.core.policies import Policy, wanted_measurements
from lossscale.core.portable import check_state, from_portable, to_portable
from lossscale.core.state import Array, Signal, list_dtypes
from lossscale.core.validation import format_value
from lossscale.errors import SettingTypeError
from lossscale.tensorflow import consensus, functional
from lossscale.tensorflow.binding import BINDING
from lossscale.tensorflow.classic import LossScale
from lossscale.tensorflow.gradient import largest_magnitude
from lossscale.tensorflow.tracing import skip_autograph_in


@skip_autograph_in("__call__", "update")
class PolicyLossScale(LossScale):
    """A loss scale that a policy moves, such as `Headroom` or one of your own.

    `LossScaleOptimizer(optimizer, policy)` makes one. It keeps a variable for every
    number of the policy's state, by its name, so checkpoints save all of them. What the
    policy reads is measured across all replicas. It moves before the update is made,
    unlike `DynamicLossScale`: if the optimizer raises, the scale has moved.

    Example:
        >>> import lossscale, tensorflow as tf, lossscale.tensorflow as ls
        >>> policy = lossscale.Headroom(lossscale.Dynamic(init_scale=8.0))
        >>> loss_scale = ls.PolicyLossScale(policy)
        >>> update_op, should_apply = loss_scale.update([tf.constant([2.0, -4.0])])
        >>> float(loss_scale()), float(loss_scale.peak)
        (16.0, 4.0)
    """

    def __init__(self, policy: Policy) -> None:
        """Start with the policy's first state.

        Raises:
            SettingTypeError: If it is not a policy.
        """
        if isinstance(policy, type) or not isinstance(policy, Policy):
            message = (
                "policy must be a policy, such as lossscale.Headroom(), got "
                f"{format_value(policy)}."
            )
            raise SettingTypeError(message)
        first = check_state(policy, policy.init())
        self._policy = policy
        self._kind = type(first)
        kinds = [
            classic.Variable(name, dtype)
            for name, dtype in zip(first._fields, list_dtypes(first), strict=True)
        ]
        self._state_variables = BINDING.create_variables_for(self, first, kinds)

    @property
    def policy(self) -> Policy:
        """The policy that moves the scale."""
        return self._policy

    @property
    def state(self) -> Any:
        """The state, as tensors."""
        return self._kind(*self._state_variables.read_all())

    def __call__(self) -> Array:
        """Return the current loss scale as a scalar float32 tensor."""
        return self._state_variables.read_all()[0]

    def update(self, grads: Any) -> tuple[Any, Array]:
        """Update the loss scale from a nested structure of unscaled gradients."""
        BINDING.check_context("update")
        state = self.state
        finite = BINDING.all_finite(grads)
        signal = Signal(finite)
        if "amax" in wanted_measurements(self._policy):
            largest = consensus.largest_of_all(_largest_finite, grads)
            signal = signal._replace(amax=functional.saturate(largest * state.scale))
        moved = functional.update(self._policy, state, signal)
        return self._state_variables.assign(moved), finite

    def get_config(self) -> dict[str, Any]:
        """Return `{"policy": ...}`, the policy in the portable form.

        Raises:
            StateError: If the policy is not one of lossscale's own.
        """
        return {"policy": to_portable(self._policy, self._policy.init())}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PolicyLossScale":
        """Create the loss scale from its config."""
        policy, _ = from_portable(config["policy"])
        return cls(policy)

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"{type(self).__name__}({self._policy!r})"


def _largest_finite(grads: Any) -> Array:
    """Return the largest magnitude of the gradients of one replica, in float32.

    0 for a gradient that is not finite.
    """
    magnitudes = [tf.zeros(())]
    for _, leaf in trees.leaves(grads):
        magnitude = largest_magnitude(leaf)
        zero = tf.zeros((), magnitude.dtype)
        # Not `is_finite`: NaN has no place in a sum over replicas either.
        counted = tf.where(magnitude <= magnitude.dtype.max, magnitude, zero)
        magnitudes.append(functional.saturate(counted))
    return tf.reduce_max(tf.stack(magnitudes))
