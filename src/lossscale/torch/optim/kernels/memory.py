# SPDX-License-Identifier: Apache-2.0
"""How the kernels find and read the elements of a tensor, and how they round.

`pointers` has a row of `COLUMNS` addresses for each parameter: the parameter itself,
then what the optimizer keeps for it. A chunk is a run of consecutive elements of one
tensor, and each program updates one chunk.
"""

# Triton parses these functions: they have no types, and arguments by position.
# ruff: noqa: ANN001, ANN201
import triton
import triton.language as tl

COLUMNS = tl.constexpr(8)
"""The length of a row of addresses."""
SCALARS = tl.constexpr(16)
"""The length of a row of numbers, of a group or of a parameter."""
SUMS = tl.constexpr(3)
"""How many numbers a measured step writes for each chunk."""


@triton.jit
def pointer_to(
    pointers, tensor, column: tl.constexpr, dtype: tl.constexpr, aligned: tl.constexpr
):
    """Return the address in a column of a tensor's row, as a pointer to elements."""
    return typed(tl.load(pointers + tensor * COLUMNS + column), dtype, aligned)


@triton.jit
def typed(address, dtype: tl.constexpr, aligned: tl.constexpr):
    """Return an address as a pointer to elements."""
    pointer = address.to(tl.pointer_type(dtype))
    if aligned:
        # Without this hint no load is wider than one element. With it a thread takes
        # four elements at a time, of float16 as of float32: with eight of float16 they
        # would go through shared memory to meet those of the master and the moments.
        pointer = tl.multiple_of(pointer, 4 * dtype.primitive_bitwidth // 8)
    return pointer


@triton.jit
def read(pointer, lane, left, masked: tl.constexpr):
    """Return the elements of a chunk in float32; a full chunk needs no mask."""
    if masked:
        values = tl.load(pointer + lane, mask=lane < left, other=0.0)
    else:
        values = tl.load(pointer + lane)
    return values.to(tl.float32)


@triton.jit
def write(pointer, lane, left, values, dtype: tl.constexpr, masked: tl.constexpr):
    """Round the elements of a chunk to their dtype and store them."""
    if masked:
        tl.store(pointer + lane, values.to(dtype), mask=lane < left)
    else:
        tl.store(pointer + lane, values.to(dtype))


@triton.jit
def saturate(values, dtype: tl.constexpr):
    """Return values that are finite in a dtype if they are finite; NaN stays NaN."""
    if dtype == tl.float16:
        values = tl.clamp(values, -65504.0, 65504.0, tl.PropagateNan.ALL)
    elif dtype == tl.bfloat16:
        largest: tl.constexpr = 3.3895313892515355e38
        values = tl.clamp(values, -largest, largest, tl.PropagateNan.ALL)
    return values


@triton.jit
def invert(grad_scale):
    """Return 1 / scale as torch has it: divided in float64, rounded to float32."""
    return (1.0 / tl.load(grad_scale).to(tl.float64)).to(tl.float32)


@triton.jit
def multiply_add(factor, values, addend):
    """Return factor * values + addend, rounded once.

    Of two products in a sum the compiler may fuse either one; this names it.

    Args:
        factor: One number.
        values: The elements of a chunk.
        addend: As many elements.
    """
    return tl.fma(factor + tl.zeros_like(values), values, addend)


@triton.jit
def measure_update(
    sums, update, weight, before, after, lane, left, masked: tl.constexpr
):
    """Write what a chunk adds to the statistics of its tensor's update.

    Sums of squares are added up in float64: an update of 1e-23 has a square that
    float32 cannot hold.

    Args:
        sums: Where to: the update's sum of squares, the weight's, and how many numbers
            of the parameter stayed as they were although their update is not zero.
        update: What is added to the weight, before the sum is rounded.
        weight: The weight before the step.
        before: The parameter before the step, in float32.
        after: The same after the step.
        lane: The indexes of the elements.
        left: How many elements there are.
        masked: Whether there are fewer than the chunk can have.
    """
    if masked:
        update = tl.where(lane < left, update, 0.0)
    added, old = update.to(tl.float64), weight.to(tl.float64)
    is_lost = (update != 0.0) & (after == before)
    tl.store(sums, tl.sum(added * added))
    tl.store(sums + 1, tl.sum(old * old))
    tl.store(sums + 2, tl.sum(tl.where(is_lost, 1.0, 0.0)).to(tl.float64))
