# SPDX-License-Identifier: Apache-2.0
"""The optax adapter: `loss_scaled`, an optimizer for the gradients of a scaled loss.

optimizer.py     loss_scaled
state.py         its state, and how to read the scale from nested optimizer states
parameters.py    parameters and gradients as the wrapped optimizer receives them
accumulation.py  MultiSteps that recovers from an overflow

It imports the core, JAX, optax and `lossscale.jax`.
"""

from lossscale.core.optional import explain_missing

try:
    import optax  # noqa: F401
except ModuleNotFoundError as error:
    raise explain_missing(error, "optax", "optax") from None

from lossscale.optax.accumulation import MultiSteps
from lossscale.optax.optimizer import loss_scaled
from lossscale.optax.state import (
    LossScaledState,
    find_states,
    get_scale,
    get_scale_state,
    scale_loss,
    with_scale_state,
)

__all__ = [
    "LossScaledState",
    "MultiSteps",
    "find_states",
    "get_scale",
    "get_scale_state",
    "loss_scaled",
    "scale_loss",
    "with_scale_state",
]
