# SPDX-License-Identifier: Apache-2.0
"""The loss times the scale, and the scale that may be used for it."""

from typing import Any

from keras import ops

from lossscale.core.headroom import LARGEST
from lossscale.core.state import Array
from lossscale.errors import GradientError
from lossscale.keras.backend import dtype_name
from lossscale.keras.tracing import would_become_constant


def multiply_loss(loss: Any, scale: Array) -> Any:
    """Return the loss times the scale, in float32 or wider: float16 ends at 65504.

    Raises:
        GradientError: If the loss is not a floating-point tensor or Python number.
    """
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        loss = ops.convert_to_tensor(float(loss), "float32")
    if not hasattr(loss, "dtype") or dtype_name(loss) not in LARGEST:
        kind = dtype_name(loss) if hasattr(loss, "dtype") else type(loss).__name__
        message = (
            f"The loss is {kind}, expected "
            f"{', '.join(LARGEST)}. Cast it with keras.ops.cast(loss, 'float32')."
        )
        raise GradientError(message)
    if dtype_name(loss) != "float64":
        loss = ops.cast(loss, "float32")
    return ops.multiply(loss, scale)


def require_current(method: str, scale: Array) -> Array:
    """Return the current scale as a tensor, unless tracing would make it a constant.

    Raises:
        GradientError: If `jax.jit` traces without the optimizer's variables.
    """
    if would_become_constant(scale):
        message = (
            f"{method} was called while jax.jit traces, without the optimizer's "
            "variables: the current scale would be baked into the compiled function as "
            "a constant. Build the optimizer and call "
            "optimizer.stateless_scale_loss(optimizer_variables, loss) with the "
            "variables that the traced function was given."
        )
        raise GradientError(message)
    return ops.convert_to_tensor(scale, "float32")
