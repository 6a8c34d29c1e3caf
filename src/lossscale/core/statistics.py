# SPDX-License-Identifier: Apache-2.0
"""`TensorStatistics`: what stored gradients look like, tensor by tensor.

`UpdateStatistics`: what the optimizer's step added to the weights. Adapters measure
both, diagnostics records them. Imports the standard library only.
"""

from collections.abc import Sequence
from typing import NamedTuple


class UpdateStatistics(NamedTuple):
    """What one step of an optimizer added to the weights, tensor by tensor.

    Every field has one entry per weight that had a gradient. The update of a weight is
    what the step adds to it (to its float32 master, if it has one), in float32, before
    the sum is rounded.
    """

    names: Sequence[str]
    """The weights, in the optimizer's order."""
    ratio: Sequence[float]
    """The norm of the update divided by the norm of the weight before the step.

    0 if the update is zero, and infinite if only the weight is.
    """
    lost: Sequence[float]
    """The fraction of each weight's numbers that stayed as they were in their own
    format, although their update was not zero: it was rounded away."""
    dtypes: Sequence[str]
    """The format of each weight, such as "float16"."""
    has_master: Sequence[bool]
    """Whether a float32 master keeps what the weight has lost."""


class TensorStatistics(NamedTuple):
    """What the stored gradients of one step look like, tensor by tensor.

    Every field but `first_exponent` has one entry per tensor; lists, NumPy arrays and
    tensors on the host will do. All of it describes the gradients *as stored*: times
    the scale, and in their own format.
    """

    names: Sequence[str]
    """The tensors, in the model's order."""
    sizes: Sequence[int]
    """How many numbers each has."""
    amax: Sequence[float]
    """The largest finite magnitude of each."""
    zeros: Sequence[float]
    """The fraction of each that is exactly zero."""
    subnormals: Sequence[float]
    """The fraction of each that is subnormal in its format, and has lost precision."""
    first_exponent: int
    """The exponent that the first count of every histogram is for."""
    counts: Sequence[Sequence[int]]
    """How many finite, non-zero numbers of each have which exponent."""
    updates: UpdateStatistics | None = None
    """What the step added to the weights; `None` if that was not measured."""
