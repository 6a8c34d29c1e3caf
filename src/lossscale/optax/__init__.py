# SPDX-License-Identifier: Apache-2.0
"""The optax adapter: `loss_scaled`, an optimizer for the gradients of a scaled loss.

    transformation   `loss_scaled`
    states           its state, and how to read the scale out of a nest of states
    accumulation     `MultiSteps` that survives an overflow

It imports the core, JAX, optax and `lossscale.jax`.
"""

from lossscale.core.optional import explain_missing

try:
    import optax  # noqa: F401
except ModuleNotFoundError as error:
    raise explain_missing(error, "optax", "optax") from None

from lossscale.optax.accumulation import MultiSteps
from lossscale.optax.states import (
    LossScaledState,
    find_states,
    get_scale,
    scale_loss,
    scale_state,
    with_scale_state,
)
from lossscale.optax.transformation import loss_scaled

__all__ = [
    "LossScaledState",
    "MultiSteps",
    "find_states",
    "get_scale",
    "loss_scaled",
    "scale_loss",
    "scale_state",
    "with_scale_state",
]
