# SPDX-License-Identifier: Apache-2.0
"""Run a plain deep network forwards and backwards in a given number format.

Eight bias-free linear layers, width 64, with GELU between them and no normalisation;
weights start as N(0, 0.02²), as GPT-2's do.

In float16 everything that tensor cores would store is stored as float16: weights,
activations and all gradients. A product reads float16, sums in float32, rounds once.
The cross-entropy is computed in float32 from the float16 logits. Imports NumPy only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossscale.demo.data import CLASSES, PIXELS

Array: TypeAlias = NDArray[np.floating[Any]]
Labels: TypeAlias = NDArray[np.int64]
Format: TypeAlias = type[np.float16] | type[np.float32]

WIDTH = 64
DEPTH = 8
START_DEVIATION = 0.02

_GELU_SLOPE = np.float32(np.sqrt(2 / np.pi))
_GELU_CUBIC = np.float32(0.044715)
_HALF = np.float32(0.5)
_ONE = np.float32(1)


class Trace(NamedTuple):
    """What the backward pass needs from the forward pass."""

    inputs: list[Array]
    """What each layer read."""

    slopes: list[Array]
    """Derivative of each GELU, one fewer than the layers."""

    logits: Array


def initial_weights(generator: np.random.Generator, depth: int = DEPTH) -> list[Array]:
    """Draw float32 weights.

    Args:
        generator: Source of randomness.
        depth: Number of linear layers.

    Returns:
        One matrix per layer, inputs by outputs.
    """
    sizes = [PIXELS] + [WIDTH] * (depth - 1) + [CLASSES]
    return [
        generator.normal(0, START_DEVIATION, shape).astype(np.float32)
        for shape in pairwise(sizes)
    ]


def forward(weights: list[Array], images: Array, number: Format) -> Trace:
    """Compute logits.

    Args:
        weights: Master weights; each is rounded to `number` before use.
        images: One image per row.
        number: Format of everything stored.

    Returns:
        Logits, and what `backward` needs.
    """
    hidden: Array = images.astype(number)
    inputs = [hidden]
    slopes: list[Array] = []
    for weight in weights[:-1]:
        value, slope = _gelu(_product(hidden, weight.astype(number), number))
        hidden = value.astype(number)
        inputs.append(hidden)
        slopes.append(slope.astype(number))
    return Trace(inputs, slopes, _product(hidden, weights[-1].astype(number), number))


def cross_entropy(logits: Array, labels: Labels) -> tuple[np.float32, Array]:
    """Average the cross-entropy over a batch, in float32.

    Args:
        logits: One row per image, in any format.
        labels: The right class of each row.

    Returns:
        The loss and its float32 gradient with respect to the logits.
    """
    rows = np.arange(len(labels))
    shifted = logits.astype(np.float32)
    shifted = shifted - shifted.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=1, keepdims=True)
    loss = np.mean(np.log(totals[:, 0]) - shifted[rows, labels], dtype=np.float32)
    gradient = exponentials / totals
    gradient[rows, labels] -= _ONE
    return np.float32(loss), gradient / np.float32(len(labels))


def backward(
    weights: list[Array], trace: Trace, seed: Array, number: Format
) -> list[Array]:
    """Carry a gradient from the logits back to every weight.

    Args:
        weights: Master weights that `forward` was given.
        trace: What `forward` returned.
        seed: Float32 gradient with respect to the logits, already scaled.
        number: Format of everything stored.

    Returns:
        Gradients in `number`, one per weight; overflow leaves infinity or NaN there.
    """
    # A scaler checks the result for overflow, so NumPy need not warn of it.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        gradient: Array = seed.astype(number)
        results = [_product(trace.inputs[-1].T, gradient, number)]
        for layer in range(len(weights) - 1, 0, -1):
            weight: Array = weights[layer].astype(number)
            gradient = _product(gradient, weight.T, number)
            slope = trace.slopes[layer - 1].astype(np.float32)
            gradient = (gradient.astype(np.float32) * slope).astype(number)
            results.append(_product(trace.inputs[layer - 1].T, gradient, number))
    return results[::-1]


def _product(left: Array, right: Array, number: Format) -> Array:
    """Multiply matrices as tensor cores do: float32 sums, rounded once."""
    product = left.astype(np.float32, copy=False) @ right.astype(np.float32, copy=False)
    return product.astype(number, copy=False)


def _gelu(values: Array) -> tuple[Array, Array]:
    """Return GELU, in GPT-2's tanh form, and its derivative, both in float32."""
    upcast_values = values.astype(np.float32, copy=False)
    square = upcast_values * upcast_values
    bend = np.tanh(_GELU_SLOPE * upcast_values * (_ONE + _GELU_CUBIC * square))
    inner = _GELU_SLOPE * (_ONE + np.float32(3) * _GELU_CUBIC * square)
    half_sum = _HALF * (_ONE + bend)
    slope = half_sum + _HALF * upcast_values * (_ONE - bend * bend) * inner
    return upcast_values * half_sum, slope
