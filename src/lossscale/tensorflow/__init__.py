# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow adapter: the five verbs and the classic classes, alive again.

Rooms: `verbs.py` (the five verbs), `leaves.py` (one gradient of any kind),
`measurements.py`, `binding.py` (variables and graphs), `replicas.py` (distribution
strategies), `classic.py` (managers and loss scales), `optimizer.py`, `wrapper.py` (the
optimizer wrapper), `inner.py` (what it wraps) and `tf_keras.py`, which is imported when
an optimizer of tf_keras is wrapped. It imports the core and TensorFlow, and no other
adapter.
"""

from lossscale.core.optional import explain_missing

try:
    import tensorflow as tf  # noqa: F401
except ModuleNotFoundError as error:
    raise explain_missing(error, "tensorflow", "TensorFlow") from None

from lossscale.tensorflow.classic import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScale,
    FixedLossScaleManager,
    LossScale,
    LossScaleManager,
    get,
)
from lossscale.tensorflow.optimizer import (
    LossScaleOptimizer,
    MixedPrecisionLossScaleOptimizer,
)
from lossscale.tensorflow.verbs import (
    init,
    scale,
    select,
    unscale,
    update,
)

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScale",
    "LossScaleManager",
    "LossScaleOptimizer",
    "MixedPrecisionLossScaleOptimizer",
    "get",
    "init",
    "scale",
    "select",
    "unscale",
    "update",
]
