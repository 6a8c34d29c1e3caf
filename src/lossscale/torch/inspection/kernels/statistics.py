# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that counts the numbers of every gradient by their exponent.

One launch covers a list of tensors of any size. A row of the result belongs to one
tensor: a count for each exponent of a range, the zeros, the numbers that are not
finite, and in its last column the bits of the largest finite magnitude as a float32
number. It waits for nothing.
"""

# Triton parses these functions: they have no types, and arguments by position.
# ruff: noqa: ANN001, ANN202, PLR2004
import torch
import triton
import triton.language as tl

from lossscale.torch.devices import device_context

KINDS = {
    torch.float32: (0, tl.float32),
    torch.float16: (1, tl.float16),
    torch.bfloat16: (2, tl.bfloat16),
}
"""The kernel's number of a dtype, and Triton's name of it."""

_BLOCK = 2048
"""How many elements a program takes at a time."""
_PARTS = 256
"""How many programs share a tensor at most."""
_EXTRA = 3
"""Zeros, numbers that are not finite, and the largest magnitude."""


@triton.jit
def _count_part(
    address,
    count,
    dtype: tl.constexpr,
    first: tl.constexpr,
    exponents: tl.constexpr,
    bins: tl.constexpr,
    block: tl.constexpr,
):
    """Return the counts of every so many blocks of a tensor, and the largest bits."""
    pointer = address.to(tl.pointer_type(dtype))
    lane = tl.arange(0, block)
    counts = tl.zeros([bins], tl.int32)
    amax = tl.zeros([block], tl.int32)
    step = tl.num_programs(1).to(tl.int64) * block
    for start in range(tl.program_id(1).to(tl.int64) * block, count, step):
        inside = start + lane < count
        x = tl.load(pointer + start + lane, mask=inside, other=0.0)
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # A subnormal number is its bits times 2**-149, and these are exact in float32.
        scaled = bits.to(tl.float32).to(tl.int32, bitcast=True)
        exponent = tl.where(bits < 0x00800000, (scaled >> 23) - 276, (bits >> 23) - 127)
        code = tl.where(bits == 0, exponents, exponent - first)
        code = tl.where(bits >= 0x7F800000, exponents + 1, code)
        # The last bin takes what is beyond the end; it is not stored.
        counts += tl.histogram(tl.where(inside, code, bins - 1), bins)
        amax = tl.maximum(amax, tl.where(bits >= 0x7F800000, 0, bits))
    return counts, tl.max(amax)


@triton.jit
def _count(
    pointers,
    sizes,
    kinds,
    rows,
    dtype: tl.constexpr,
    mixed: tl.constexpr,
    first: tl.constexpr,
    exponents: tl.constexpr,
    bins: tl.constexpr,
    block: tl.constexpr,
):
    """Add the counts of one part of one tensor to its row.

    Args:
        pointers: The address of each tensor, int64.
        sizes: The number of elements of each, int64.
        kinds: The kind of each, int64; read only if they are mixed.
        rows: Output, int64: `exponents` counts and three numbers for each tensor, 0.
        dtype: The dtype of all tensors, if they are not mixed.
        mixed: Whether the tensors have several dtypes.
        first: The exponent of the first count.
        exponents: How many exponents there are.
        bins: A power of two, larger than `exponents` by 3 or more.
        block: How many elements are taken at a time.
    """
    tensor = tl.program_id(0)
    address = tl.load(pointers + tensor)
    size = tl.load(sizes + tensor)
    kind = tl.load(kinds + tensor) if mixed else 0
    # fmt: off
    if not mixed:
        counts, amax = _count_part(
            address, size, dtype, first, exponents, bins, block)
    elif kind == 0:
        counts, amax = _count_part(
            address, size, tl.float32, first, exponents, bins, block)
    elif kind == 1:
        counts, amax = _count_part(
            address, size, tl.float16, first, exponents, bins, block)
    else:
        counts, amax = _count_part(
            address, size, tl.bfloat16, first, exponents, bins, block)
    # fmt: on
    row = rows + tensor.to(tl.int64) * (exponents + 3)
    lane = tl.arange(0, bins)
    stored = (lane < exponents + 2) & (counts > 0)
    tl.atomic_add(row + lane, counts.to(tl.int64), mask=stored)
    tl.atomic_max(row + (exponents + 2), amax.to(tl.int64))


def count_exponents(
    grads: list[torch.Tensor], first: int, exponents: int
) -> torch.Tensor:
    """Return one row for each tensor, on their device.

    Args:
        grads: Dense tensors without gaps, of one device and of the dtypes of `KINDS`.
        first: The exponent of the first count.
        exponents: How many exponents are counted; all that occur must be among them.
    """
    device = grads[0].device
    dtypes = [grad.dtype for grad in grads]
    sizes = [grad.numel() for grad in grads]
    numbers = [[grad.data_ptr() for grad in grads], sizes]
    numbers.append([KINDS[dtype][0] for dtype in dtypes])
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type != "cpu":
        table = table.pin_memory().to(device, non_blocking=True)
    width = exponents + _EXTRA
    rows = torch.zeros((len(grads), width), dtype=torch.int64, device=device)
    parts = max(1, min(_PARTS, triton.cdiv(max(sizes), _BLOCK)))
    with device_context(device):
        _count[(len(grads), parts)](
            *table.unbind(),
            rows,
            KINDS[dtypes[0]][1],
            len(set(dtypes)) > 1,
            first,
            exponents,
            triton.next_power_of_2(width),
            _BLOCK,
        )
    return rows
