# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow adapter: the functional API, and TensorFlow's loss-scale classes.

functional.py         init, scale, unscale, update, select
gradient.py           one gradient: dense, sparse or ragged
measurements.py       what `unscale` measures when it is asked to
policy_loss_scale.py  a policy as a loss scale
classic.py            managers and loss scales on `tf.Variable`s
optimizer.py          the optimizer wrapper under its classic names
tf_keras.py           tf_keras's wrapper; imported for an optimizer of tf_keras
wrapper.py            the training step of every wrapper
wrapped_optimizer.py  the optimizers that they wrap
binding.py            variables and graphs, for the classic classes
graph_names.py        names of an optimizer's variables, as the originals'
consensus.py          one decision for all replicas of a strategy
tracing.py            keeps AutoGraph out of lossscale

It imports the core and TensorFlow, and no other adapter.
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
from lossscale.tensorflow.functional import (
    init,
    scale,
    select,
    unscale,
    update,
)
from lossscale.tensorflow.optimizer import (
    LossScaleOptimizer,
    MixedPrecisionLossScaleOptimizer,
)
from lossscale.tensorflow.policy_loss_scale import PolicyLossScale

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScale",
    "LossScaleManager",
    "LossScaleOptimizer",
    "MixedPrecisionLossScaleOptimizer",
    "PolicyLossScale",
    "get",
    "init",
    "scale",
    "select",
    "unscale",
    "update",
]
