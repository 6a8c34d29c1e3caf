# SPDX-License-Identifier: Apache-2.0
"""Find the first scale on one batch before `fit`."""

from typing import Any

from lossscale.core.validation import format_value
from lossscale.errors import SettingError
from lossscale.keras.backend import read
from lossscale.keras.optimizer import LossScaleOptimizer


def find_scale(model: Any, x: Any, y: Any = None, sample_weight: Any = None) -> float:
    """Train on one batch until it is finite, and return the scale that was found.

    For a model that was compiled with `LossScaleOptimizer(..., policy=AutoStart())`.
    Call it with the first batch before `fit`, whose training step cannot be taken
    again. A try that overflows changes no weight; the finite one is an update. Layers
    that count batches, such as batch normalization, see the batch again with each try,
    and the model's metrics are reset. Each try waits for the device. Without it the
    tries are steps of `fit`, each of which costs a batch.

    Args:
        model: The compiled model.
        x: The inputs of one batch, as for `model.train_on_batch`.
        y: Its targets.
        sample_weight: Its weights.

    Raises:
        SettingError: If the model's optimizer has no policy that searches its scale.

    Example:
        >>> import keras, lossscale, numpy as np
        >>> from lossscale.keras import LossScaleOptimizer, find_scale
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> policy = lossscale.AutoStart()
        >>> inner = keras.optimizers.SGD(0.01)
        >>> model.compile(LossScaleOptimizer(inner, policy=policy), "mse")
        >>> batch = np.full((4, 1), 1000.0)
        >>> find_scale(model, batch, batch) < 65536.0
        True
    """
    # A model that was not compiled has no optimizer, not even None.
    optimizer = getattr(model, "optimizer", None)
    policy: Any = getattr(optimizer, "policy", None)
    if not isinstance(optimizer, LossScaleOptimizer) or not hasattr(
        policy, "is_starting"
    ):
        found = (
            "this one was not compiled: call model.compile(optimizer, loss) first"
            if optimizer is None
            else f"this one has {format_value(optimizer)} with the policy "
            f"{format_value(policy)}"
        )
        message = (
            "find_scale needs a model that was compiled with "
            "lossscale.keras.LossScaleOptimizer(..., policy=lossscale.AutoStart()); "
            f"{found}."
        )
        raise SettingError(message)
    for _ in range(policy.tries + 1):
        model.train_on_batch(x, y, sample_weight)
        optimizer = model.optimizer  # on JAX the access returns fit's variables
        if not bool(policy.is_starting(optimizer.state)):
            break
        if not bool(optimizer.last_step.skipped):
            break  # gradients that are all zero
    model.reset_metrics()
    return float(read(model.optimizer.dynamic_scale))
