# SPDX-License-Identifier: Apache-2.0
"""The exception tree: everything that lossscale raises on purpose.

    LossScaleError
    ├── SettingError          (ValueError)   a setting no policy can work with
    ├── SettingTypeError      (TypeError)    a setting of the wrong kind
    ├── GradientError         (TypeError)    a gradient, loss or flag of no use
    ├── StructureError        (ValueError)   two nested structures that do not match
    ├── StateError            (ValueError)   a saved state that cannot be used
    ├── ContextError          (ValueError)   a call from a place where it cannot work
    ├── CollapseError         (FloatingPointError)  nothing but skipped steps
    ├── DriftError            (RuntimeError) ranks whose scales have come apart
    └── MissingPackageError   (ImportError)  an optional part that is not installed

`CollapseWarning` (a UserWarning) says what `CollapseError` says, where it is not to
stop the training.

Each is also the builtin exception that a caller would have caught, so code written
for the libraries we replace keeps working. Every message says what was given, what
was expected and what to type.
"""


class LossScaleError(Exception):
    """Base class of every exception that lossscale raises on purpose."""

    # tf.function hands on exceptions of a kind that has no constructor of its own, and
    # turns others into its StagingError. Without this line that is ValueError's.
    __init__ = Exception.__init__


class SettingError(LossScaleError, ValueError):
    """A policy or class was given a value that it cannot work with."""


class SettingTypeError(LossScaleError, TypeError):
    """A policy or class was given a value of the wrong kind."""


class GradientError(LossScaleError, TypeError):
    """A gradient or loss is not a floating-point array, or a flag not a boolean."""


class StructureError(LossScaleError, ValueError):
    """Two nested structures that should match do not."""


class StateError(LossScaleError, ValueError):
    """A saved state is malformed, foreign, newer, or cannot be expressed."""


class ContextError(LossScaleError, ValueError):
    """A call came from a place where it cannot work, such as another graph."""


class CollapseError(LossScaleError, FloatingPointError):
    """So many steps in a row were skipped that the training stands still."""


class DriftError(LossScaleError, RuntimeError):
    """The ranks of a distributed training have different scales."""


class CollapseWarning(UserWarning):
    """So many steps in a row were skipped that the training stands still."""


class MissingPackageError(LossScaleError, ImportError):
    """An optional part of lossscale needs a package that is not installed."""
