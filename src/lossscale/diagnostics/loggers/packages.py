# SPDX-License-Identifier: Apache-2.0
"""Import the packages that writers need, or say what to install."""

import importlib
from typing import Any

from lossscale.errors import MissingPackageError

_EXTRAS = ("jax", "keras", "mlflow", "tensorboard", "trackio", "wandb")
"""The packages that are an extra of ours."""


def _install(package: str) -> str:
    return f"'lossscale[{package}]'" if package in _EXTRAS else package


def import_package(name: str, needed_by: str, install: str | None = None) -> Any:
    """Return a module.

    Args:
        name: The module.
        needed_by: What needs it, for the message.
        install: What pip calls the package, if not by the module's name.

    Raises:
        MissingPackageError: If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # it is there, and something of its own is not
        message = (
            f"{needed_by} needs the package {package}, which is not installed. "
            f"Install it with: pip install {install or _install(package)}"
        )
        raise MissingPackageError(message) from None
