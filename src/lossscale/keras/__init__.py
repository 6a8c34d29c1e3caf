# SPDX-License-Identifier: Apache-2.0
"""The Keras 3 adapter: Keras's LossScaleOptimizer, and weights that stay finite.

optimizer.py      Keras's LossScaleOptimizer with a policy
report.py         what became of the last step
explanation/      why a batch was not finite, on every backend
callbacks.py      the scale in the logs of `fit`
start.py          the first scale, found before `fit`
arguments.py      the constructor's arguments, policies and configs
checkpoint.py     configs and saved variables
loss.py           the loss times the scale
gradients.py      gradients validated, unscaled and checked
headroom.py       how large an unscaled gradient may be
stateless.py      a step on values, for JAX
consensus.py      one decision for all replicas, on TensorFlow
training_loop.py  whether `apply` gets scaled or unscaled gradients
backend.py        operations that `keras.ops` lacks or makes slow
tracing.py        values and tracers

It imports the core and Keras, and no other adapter.
"""

from lossscale.core.optional import explain_missing
from lossscale.errors import MissingPackageError

try:
    import keras
except ModuleNotFoundError as error:
    raise explain_missing(
        error, "keras", "Keras 3", also="one of tensorflow, jax and torch"
    ) from None

if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14):
    _message = (
        f"lossscale.keras needs Keras 3.14 or newer, this is {keras.__version__}. "
        "Install it with: pip install 'lossscale[keras]'"
    )
    raise MissingPackageError(_message)

from lossscale.keras.callbacks import LossScaleLogger
from lossscale.keras.explanation.explainer import explain
from lossscale.keras.optimizer import LossScaleOptimizer
from lossscale.keras.report import StepReport
from lossscale.keras.start import find_scale

__all__ = [
    "LossScaleLogger",
    "LossScaleOptimizer",
    "StepReport",
    "explain",
    "find_scale",
]
