# SPDX-License-Identifier: Apache-2.0
"""Step weights with Muon: momentum made orthogonal, always in float32.

Constants are those of the reference, K. Jordan et al., "Muon: an optimizer for hidden
layers in neural networks", 2024, https://kellerjordan.github.io/posts/muon/: rate 0.02,
Nesterov momentum 0.95, five Newton-Schulz iterations, epsilon 1e-7. Two departures:
iterations run in float32, not bfloat16, and the first and the last layer use Muon too,
where the reference takes Adam.

Muon and not Adam: every step has the same size however small the gradients, and moves
all directions of a matrix alike. Adam has the first property only; with it float32
itself gets stuck in a network this deep that starts this small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lossscale.demo.network import Array

RATE = 0.02
MOMENTUM = np.float32(0.95)
EPSILON = np.float32(1e-7)

_ITERATIONS = 5
_LINEAR, _CUBIC, _QUINTIC = np.float32(3.4445), np.float32(-4.775), np.float32(2.0315)


def step(
    weights: list[Array], momenta: list[Array], gradients: list[Array], rate: float
) -> tuple[list[Array], list[Array]]:
    """Take one step.

    Args:
        weights: Float32 master weights.
        momenta: One array per weight, zero at the start.
        gradients: Unscaled float32 gradients.
        rate: Spectral norm of the step, about.

    Returns:
        New weights and new momenta; the arguments are left as they were.
    """
    new_weights: list[Array] = []
    new_momenta: list[Array] = []
    for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
        moved: Array = MOMENTUM * momentum + gradient
        # Infinite gradients give NaN here; the caller does not select that step.
        with np.errstate(over="ignore", invalid="ignore"):
            direction = _orthogonal(MOMENTUM * moved + gradient)
        new_momenta.append(moved)
        new_weights.append(weight - np.float32(rate) * direction)
    return new_weights, new_momenta


def _orthogonal(matrix: Array) -> Array:
    """Bring all singular values near 1 by Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    result: Array = matrix.T if tall else matrix
    result = result / (np.sqrt(np.sum(result * result)) + EPSILON)
    for _ in range(_ITERATIONS):
        gram = result @ result.T
        result = _LINEAR * result + (_CUBIC * gram + _QUINTIC * gram @ gram) @ result
    return result.T if tall else result
