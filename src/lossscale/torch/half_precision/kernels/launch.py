# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels that normalize rows."""

import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lossscale.torch.devices import device_context
from lossscale.torch.half_precision.kernels import norms
from lossscale.torch.inspection.kernels.launch import KernelLauncher

TILE = 4096
"""How many elements a tile has, if its rows are not wider than that."""
PROGRAMS = 512
"""Into how many parts the rows are divided for the gradients of the weights."""
SUM_TILE, SUM_WIDTH = 64, 32
"""How many rows and columns of the sums a program adds up at a time."""

_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Tiles(NamedTuple):
    """How rows of some length are divided among programs."""

    columns: int
    width: int
    """The next power of two."""
    rows: int
    """How many rows a tile has."""
    warps: int

    @classmethod
    def of(cls, columns: int) -> "Tiles":
        """Return the tiles for rows of a length."""
        width = triton.next_power_of_2(columns)
        rows = max(1, min(16, TILE // width))
        return cls(columns, width, rows, max(4, min(16, width // 1024)))

    def constants_for(self, dtype: torch.dtype) -> tuple[object, ...]:
        """Return the compile-time constants that describe rows of a dtype."""
        return _DTYPES[dtype], self.columns, self.width, self.rows


def normalize(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    has_mean: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalized rows, and the statistics that the backward pass needs.

    Args:
        rows: Two dimensions, without gaps, aligned.
        weight: What multiplies each column, in float32.
        bias: What is added to each column, in float32.
        epsilon: What is added to the variance.
        has_mean: Whether the mean is subtracted.
    """
    count, columns = rows.shape
    tiles = Tiles.of(columns)
    outputs = torch.empty_like(rows)
    statistics = torch.empty(
        (2 if has_mean else 1) * count, dtype=torch.float32, device=rows.device
    )
    arguments = (rows, weight, bias, outputs, statistics)
    constants = (*tiles.constants_for(rows.dtype), epsilon, has_mean)
    with device_context(rows.device):
        _launcher_of(rows.device).launch(
            norms.normalize,
            triton.cdiv(count, tiles.rows),
            (*_or_rows(arguments, rows), count),
            (*constants, weight is not None, bias is not None),
            warps=tiles.warps,
        )
    return outputs, statistics


def normalize_backward(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    output_grads: torch.Tensor,
    statistics: torch.Tensor,
    *,
    has_mean: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of rows, weight and bias; `None` for what is not wanted.

    Args:
        rows: What was given to `normalize`.
        weight: The same.
        output_grads: The gradients of the normalized rows, without gaps, aligned.
        statistics: What `normalize` has returned.
        has_mean: Whether the mean was subtracted.
        wants_weight: Whether the gradient of the weight is wanted.
        wants_bias: Whether that of the bias is.
    """
    count, columns = rows.shape
    tiles, device = Tiles.of(columns), rows.device
    programs = min(triton.cdiv(count, tiles.rows), PROGRAMS)
    input_grads = torch.empty_like(rows)
    sums = statistics  # not written to, unless one of them is wanted
    if wants_weight or wants_bias:
        sums = torch.empty((programs, 2 * columns), dtype=torch.float32, device=device)
    arguments = (rows, weight, output_grads, statistics, input_grads, sums)
    constants = (*tiles.constants_for(rows.dtype), has_mean, weight is not None)
    launcher = _launcher_of(device)
    with device_context(device):
        launcher.launch(
            norms.normalize_backward,
            programs,
            (*_or_rows(arguments, rows), count),
            (*constants, wants_weight, wants_bias),
            warps=tiles.warps,
        )
        if sums is statistics:
            return input_grads, None, None
        totals = torch.empty(2 * columns, dtype=torch.float32, device=device)
        launcher.launch(
            norms.add_sums,
            triton.cdiv(2 * columns, SUM_WIDTH),
            (sums, totals, programs),
            (2 * columns, SUM_TILE, SUM_WIDTH),
        )
    weight_grad, bias_grad = totals.view(2, columns).unbind()
    return (
        input_grads,
        weight_grad if wants_weight else None,
        bias_grad if wants_bias else None,
    )


def _or_rows(
    arguments: tuple[torch.Tensor | None, ...], rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return arguments with the rows in the place of those that a kernel ignores."""
    return tuple(rows if argument is None else argument for argument in arguments)


class _Launchers(threading.local):
    """Launchers of one thread, by device: autograd runs backward passes in its own."""

    def __init__(self) -> None:
        self.of_device: dict[torch.device, KernelLauncher] = {}


_launchers = _Launchers()


def _launcher_of(device: torch.device) -> KernelLauncher:
    launcher = _launchers.of_device.get(device)
    if launcher is None:
        launcher = _launchers.of_device[device] = KernelLauncher()
    return launcher
