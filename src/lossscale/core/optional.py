# SPDX-License-Identifier: Apache-2.0
"""Optional frameworks: one sentence that says what to install.

try:
    import torch
except ModuleNotFoundError as error:
    raise explain_missing(error, "torch", "PyTorch") from None
"""

from lossscale.errors import MissingPackageError


def explain_missing(
    error: ModuleNotFoundError, module: str, name: str, *, also: str = ""
) -> ImportError:
    """Return what to raise where a framework could not be imported.

    If the framework is installed and one of its own dependencies is missing, that is
    the error itself, unchanged.

    Args:
        error: The error that the import raised.
        module: The framework's module, which is the name of its extra as well.
        name: The framework's name, for people.
        also: What else must be installed, if anything.

    Example:
        >>> error = ModuleNotFoundError(name="torch")
        >>> str(explain_missing(error, "torch", "PyTorch"))[:54]
        'lossscale.torch needs PyTorch, which is not installed.'
    """
    if error.name != module:
        return error
    further = f", and {also}." if also else ""
    message = (
        f"lossscale.{module} needs {name}, which is not installed. Install it with: "
        f"pip install 'lossscale[{module}]'{further}"
    )
    missing: ImportError = MissingPackageError(message)
    return missing
