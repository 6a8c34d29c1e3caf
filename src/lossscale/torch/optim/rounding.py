# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of second moments to bfloat16, by torch's functions.

bfloat16 has 8 significant bits. At the default `beta2` a step adds a thousandth of the
difference to a second moment, which is less than half the distance to the next number:
rounded to nearest, it would never move again. Here a value is rounded up with the
probability that makes the mean exact. The noise is a hash of the step and of the
element's position in memory, so that a training is the same whenever it is resumed, and
by the kernels and here; `kernels/adam.py` computes the same.
"""

import torch

_PIECE = 2**20
"""How many elements are rounded at a time."""

_STEP = 0x9E3779B9
"""What each step adds to the positions: 2**32 divided by the golden ratio."""


def round_stochastically_(values: torch.Tensor, step: torch.Tensor) -> None:
    """Round float32 numbers to such that bfloat16 has; NaN stays NaN.

    Args:
        values: The numbers, without gaps in memory; changed in place.
        step: The number of the step: one number, which is not read by the host.
    """
    flat = values.as_strided((values.numel(),), (1,))
    shift = (step.to(torch.int64) * _STEP).to(torch.int32)
    shift = shift.to(values.device, non_blocking=True)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        index = torch.arange(start, start + len(piece), device=values.device)
        noise = _hash(index, shift)
        rounded = (piece.view(torch.int32) + noise).bitwise_and_(-(2**16))
        torch.where(piece.isnan(), piece, rounded.view(torch.float32), out=piece)


def _hash(index: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits for each position: products wrap around 2**32."""
    high = (index >> 32).to(torch.int32)
    bits = index.to(torch.int32) ^ (high * _signed(0x85EBCA6B))
    bits += shift
    # Wellons' lowbias32. The shifts of int32 copy the sign, and the masks drop it.
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(0x846CA68B)
    return (bits >> 16) & 0xFFFF


def _signed(number: int) -> int:
    """Return a number of 32 bits as torch's int32 has it."""
    return number - 2**32 if number >= 2**31 else number
