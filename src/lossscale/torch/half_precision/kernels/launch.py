# SPDX-License-Identifier: Apache-2.0
"""`RowKernels`: the kernels that normalize rows of one kind, and their launches."""

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl

from lossscale.torch.devices import device_context
from lossscale.torch.half_precision.kernels import norms
from lossscale.torch.inspection.kernels.launch import KernelVariant

TILE = 4096
"""How many elements a tile has at the most, if its rows are not wider than that."""
FEWEST_PROGRAMS = 32
"""A tile has fewer rows if there would be fewer programs than this."""
MOST_PROGRAMS = 264
"""In the backward pass, where each program writes a row of sums: two programs for each
multiprocessor of an H200. With more rows a program takes several tiles."""
SUM_TILE, SUM_WIDTH = 64, 32
"""How many rows and columns of these sums one program adds up at a time."""

_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class RowKind(NamedTuple):
    """What the kernels are compiled for."""

    device: torch.device
    dtype: torch.dtype
    columns: int
    """How many numbers a row has."""
    tile: int
    """How many rows a program takes at a time."""
    epsilon: float
    """What is added to the variance."""
    has_mean: bool
    """Whether the mean is subtracted."""
    has_weight: bool
    has_bias: bool


@cache
def find_tile(columns: int, count: int) -> int:
    """Return how many rows a program takes at a time: a power of two.

    Args:
        columns: How many numbers a row has.
        count: How many rows there are.
    """
    most = min(16, TILE // _width_of(columns), count // FEWEST_PROGRAMS)
    return 1 << max(0, most.bit_length() - 1)


def warps_of(columns: int) -> int:
    """Return how many warps take a tile: with more elements a thread would spill."""
    return max(4, min(16, _width_of(columns) // 1024))


def _width_of(columns: int) -> int:
    """Return the next power of two."""
    return 1 << (columns - 1).bit_length()


class RowKernels:
    """The kernels for rows of one kind."""

    def __init__(self, kind: RowKind) -> None:
        width = _width_of(kind.columns)
        self._kind = kind
        self._warps = warps_of(kind.columns)
        self._shape = (_DTYPES[kind.dtype], kind.columns, width, kind.tile)
        self._forward = KernelVariant(
            norms.normalize,
            (*self._shape, kind.epsilon, *kind[-3:]),
            warps=self._warps,
        )
        self._backward: dict[tuple[bool, bool], KernelVariant] = {}
        self._parts = -(-kind.columns // SUM_WIDTH)
        self._add = {
            rows: KernelVariant(
                norms.add_sums, (kind.columns, rows, SUM_TILE, SUM_WIDTH)
            )
            for rows in (1, 2)
        }

    def normalize(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalized rows, and the statistics that the backward pass needs.

        Args:
            rows: A tensor of any shape without gaps, aligned.
            weight: What multiplies each column, in float32.
            bias: What is added to each column, in float32.
        """
        kind = self._kind
        count = rows.numel() // kind.columns
        outputs = torch.empty_like(rows)
        length = 2 * count if kind.has_mean else count
        statistics = torch.empty(length, dtype=torch.float32, device=kind.device)
        weight = rows if weight is None else weight  # the kernel ignores it
        bias = rows if bias is None else bias
        with device_context(kind.device):
            self._forward.launch(
                -(-count // kind.tile),
                (rows, weight, bias, outputs, statistics, count),
            )
        return outputs, statistics

    def differentiate(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        output_grads: torch.Tensor,
        statistics: torch.Tensor,
        wants: tuple[bool, bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of rows, weight and bias; `None` for what is not wanted.

        Args:
            rows: What was given to `normalize`.
            weight: The same.
            bias: The same.
            output_grads: The gradients of its results, without gaps, aligned.
            statistics: What it has returned.
            wants: Whether the gradients of weight and of bias are wanted.
        """
        kind = self._kind
        count = rows.numel() // kind.columns
        programs = min(-(-count // kind.tile), MOST_PROGRAMS)
        input_grads = torch.empty_like(rows)
        weight_grad = (
            torch.empty_like(weight) if weight is not None and wants[0] else None
        )
        bias_grad = torch.empty_like(bias) if bias is not None and wants[1] else None
        grads = [grad for grad in (weight_grad, bias_grad) if grad is not None]
        sums = statistics  # not written to if neither gradient is wanted
        if grads:
            length = programs * len(grads) * kind.columns
            sums = torch.empty(length, dtype=torch.float32, device=kind.device)
        weight = rows if weight is None else weight  # the kernel ignores it
        with device_context(kind.device):
            self._find_backward(wants).launch(
                programs,
                (rows, weight, output_grads, statistics, input_grads, sums, count),
            )
            if grads:
                self._add[len(grads)].launch(
                    self._parts * len(grads), (sums, grads[0], grads[-1], programs)
                )
        return input_grads, weight_grad, bias_grad

    def _find_backward(self, wants: tuple[bool, bool]) -> KernelVariant:
        variant = self._backward.get(wants)
        if variant is None:
            kind = self._kind
            constants = (*self._shape, kind.has_mean, kind.has_weight, *wants)
            variant = KernelVariant(
                norms.normalize_backward, constants, warps=self._warps
            )
            self._backward[wants] = variant
        return variant


find_kernels = cache(RowKernels)
"""Returns the kernels of a kind: always the same ones."""
