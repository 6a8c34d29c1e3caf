# SPDX-License-Identifier: Apache-2.0
"""The Keras 3 adapter: Keras's LossScaleOptimizer, and weights that stay finite.

It offers one optimizer, a subclass of `keras.optimizers.LossScaleOptimizer` for the
TensorFlow, JAX and torch backends (`optimizer.py`), what its last step did
(`facts.py`), and a callback that writes that into the logs (`callbacks.py`). It imports
the core and Keras, and no other adapter.
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
from lossscale.keras.facts import LastStep
from lossscale.keras.optimizer import LossScaleOptimizer

__all__ = ["LastStep", "LossScaleLogger", "LossScaleOptimizer"]
