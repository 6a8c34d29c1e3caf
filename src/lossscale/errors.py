# SPDX-License-Identifier: Apache-2.0
"""The exception tree: everything that lossscale raises on purpose.

    LossScaleError
    ├── SettingError          (ValueError)   a setting that no policy accepts
    ├── SettingTypeError      (TypeError)    a setting of the wrong type
    ├── GradientError         (TypeError)    a gradient, loss or flag of the wrong type
    ├── StructureError        (ValueError)   two nested structures that do not match
    ├── StateError            (ValueError)   a saved state that cannot be used
    ├── ContextError          (ValueError)   a call in a context that forbids it
    ├── CollapseError         (FloatingPointError)  too many skipped steps in a row
    ├── DriftError            (RuntimeError) loss scales that differ between ranks
    └── MissingPackageError   (ImportError)  a package that is not installed

`CollapseWarning` (a UserWarning) reports the same as `CollapseError` without stopping
the training.

Each is also the builtin exception that a caller would have caught, so code written
for the libraries we replace keeps working. Every message says what was given, what
was expected and what to type.
"""


class LossScaleError(Exception):
    """Base class of every exception that lossscale raises on purpose.

    Example:
        >>> from lossscale import Dynamic
        >>> from lossscale.errors import LossScaleError
        >>> try:
        ...     Dynamic(growth_factor=0.5)
        ... except LossScaleError as error:
        ...     print(type(error).__name__)
        SettingError
    """

    # tf.function re-raises exceptions whose class has no constructor of its own, and
    # turns others into its StagingError. Without this line it would find ValueError's.
    __init__ = Exception.__init__


class SettingError(LossScaleError, ValueError):
    """A policy or class was given a value that it does not accept.

    Example:
        >>> from lossscale import Dynamic
        >>> Dynamic(growth_factor=0.5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lossscale.errors.SettingError: growth_factor must be a number above 1 ...
    """


class SettingTypeError(LossScaleError, TypeError):
    """A policy or class was given a value of the wrong type.

    Example:
        >>> from lossscale import Dynamic
        >>> Dynamic(growth_interval="often")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lossscale.errors.SettingTypeError: growth_interval must be a whole number ...
    """


class GradientError(LossScaleError, TypeError):
    """A gradient or loss is not a floating-point array, or a flag not a boolean.

    Example:
        >>> import numpy as np, lossscale, lossscale.numpy as ls
        >>> state = ls.init(lossscale.Fixed(8.0))
        >>> ls.unscale(np.array([1, 2]), state)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lossscale.errors.GradientError: The gradient is int64, expected float16, ...
    """


class StructureError(LossScaleError, ValueError):
    """Two nested structures that should match do not.

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.select(True, {"w": 1.0}, {"b": 1.0})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lossscale.errors.StructureError: The two structures differ at the top: ...
    """


class StateError(LossScaleError, ValueError):
    """A saved state is malformed, foreign, newer, or cannot be expressed.

    Example:
        >>> from lossscale import from_portable
        >>> from_portable({"format": "lossscale/9"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lossscale.errors.StateError: This state has format 'lossscale/9', ...
    """


class ContextError(LossScaleError, ValueError):
    """A call was made in a context that does not allow it, such as another graph.

    Example:
        >>> import torch
        >>> from lossscale.testing.torch import inject
        >>> with inject(torch.nn.Linear(2, 1), "weight", "nan", steps=1) as injection:
        ...     injection.__enter__()
        Traceback (most recent call last):
        lossscale.errors.ContextError: The fault in weight is being injected already.
    """


class CollapseError(LossScaleError, FloatingPointError):
    """So many steps in a row were skipped that nothing is being trained.

    Example:
        >>> import torch
        >>> from lossscale.torch import GradScaler
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler("cpu", on_collapse="raise")
        >>> for _ in range(100):  # doctest: +ELLIPSIS
        ...     scaler.scale(weight * float("inf")).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        Traceback (most recent call last):
        lossscale.errors.CollapseError: 100 consecutive steps were skipped; ...
    """


class DriftError(LossScaleError, RuntimeError):
    """The ranks of a distributed training have different loss scales."""


class CollapseWarning(UserWarning):
    """So many steps in a row were skipped that nothing is being trained.

    Example:
        >>> import warnings
        >>> from lossscale.errors import CollapseError, CollapseWarning
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", CollapseWarning)  # as an exception
        ...     warnings.warn("20 steps in a row", CollapseWarning)
        Traceback (most recent call last):
        lossscale.errors.CollapseWarning: 20 steps in a row
    """


class MissingPackageError(LossScaleError, ImportError):
    """An optional part of lossscale needs a package that is not installed.

    Example:
        >>> from lossscale.errors import MissingPackageError
        >>> try:
        ...     import lossscale.optax
        ... except MissingPackageError as error:
        ...     print(error)  # says what to type
    """
