# SPDX-License-Identifier: Apache-2.0
"""`TensorStatistics`: what stored gradients look like, tensor by tensor.

Adapters measure it, diagnostics records it. Imports the standard library only.
"""

from collections.abc import Sequence
from typing import NamedTuple


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
    """The share of each that is exactly zero."""
    subnormals: Sequence[float]
    """The share of each that is subnormal in its format, and has lost precision."""
    first_exponent: int
    """The exponent that the first count of every histogram is for."""
    counts: Sequence[Sequence[int]]
    """How many finite, non-zero numbers of each have which exponent."""
