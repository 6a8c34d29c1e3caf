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
    """Base class of every exception that lossscale raises on purpose."""

    # tf.function re-raises exceptions whose class has no constructor of its own, and
    # turns others into its StagingError. Without this line it would find ValueError's.
    __init__ = Exception.__init__


class SettingError(LossScaleError, ValueError):
    """A policy or class was given a value that it does not accept."""


class SettingTypeError(LossScaleError, TypeError):
    """A policy or class was given a value of the wrong type."""


class GradientError(LossScaleError, TypeError):
    """A gradient or loss is not a floating-point array, or a flag not a boolean."""


class StructureError(LossScaleError, ValueError):
    """Two nested structures that should match do not."""


class StateError(LossScaleError, ValueError):
    """A saved state is malformed, foreign, newer, or cannot be expressed."""


class ContextError(LossScaleError, ValueError):
    """A call was made in a context that does not allow it, such as another graph."""


class CollapseError(LossScaleError, FloatingPointError):
    """So many steps in a row were skipped that nothing is being trained."""


class DriftError(LossScaleError, RuntimeError):
    """The ranks of a distributed training have different loss scales."""


class CollapseWarning(UserWarning):
    """So many steps in a row were skipped that nothing is being trained."""


class MissingPackageError(LossScaleError, ImportError):
    """An optional part of lossscale needs a package that is not installed."""
