# SPDX-License-Identifier: Apache-2.0
"""Writers of steps and alarms for the trackers that people use.

A writer is given to a `Recorder` (`writers=[...]`), or used by itself as a scaler's
`on_step`. A callback is given to a trainer. Each imports its package when it is first
used, and says what to install if it is missing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lossscale.diagnostics.loggers.base import StepWriter, WindowWriter
from lossscale.diagnostics.loggers.python_logging import LoggingWriter

if TYPE_CHECKING:
    from lossscale.diagnostics.loggers.accelerate import AccelerateWriter
    from lossscale.diagnostics.loggers.keras import KerasCallback
    from lossscale.diagnostics.loggers.lightning import LightningCallback
    from lossscale.diagnostics.loggers.mlflow import MlflowWriter
    from lossscale.diagnostics.loggers.tensorboard import TensorBoardWriter
    from lossscale.diagnostics.loggers.trackio import TrackioWriter
    from lossscale.diagnostics.loggers.transformers import TransformersCallback
    from lossscale.diagnostics.loggers.wandb import WandbWriter

__all__ = [
    "AccelerateWriter",
    "KerasCallback",
    "LightningCallback",
    "LoggingWriter",
    "MlflowWriter",
    "StepWriter",
    "TensorBoardWriter",
    "TrackioWriter",
    "TransformersCallback",
    "WandbWriter",
    "WindowWriter",
]

_MODULES = {
    "AccelerateWriter": "accelerate",
    "KerasCallback": "keras",
    "LightningCallback": "lightning",
    "MlflowWriter": "mlflow",
    "TensorBoardWriter": "tensorboard",
    "TrackioWriter": "trackio",
    "TransformersCallback": "transformers",
    "WandbWriter": "wandb",
}
"""The names that need a package, and where each of them is."""


def __getattr__(name: str) -> Any:
    """Return a name that needs a package."""
    if name not in _MODULES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
