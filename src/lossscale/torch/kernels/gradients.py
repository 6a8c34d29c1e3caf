# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that go over every gradient: the only expensive part of a step.

A launch covers a list of tensors of any size. `pointers` says where each of them is; a
chunk is a run of numbers of one tensor, and each program takes one chunk. For every
chunk `read` writes the sum of squares and the largest magnitude, be it infinity or NaN:
one read tells whether the gradients are finite, which of them are not, and their norm.

The numbers are float32 (kind 0), float16 (1), bfloat16 (2) or float64 (3). A list of
several kinds branches on that of each tensor; a list of one kind has no branch.
"""

# Triton parses these functions and knows no types; it has its own idea of a call.
# ruff: noqa: ANN001, ANN201, ANN202, PLR2004
import triton
import triton.language as tl

# Of a float32 sum of squares below this, too much has vanished.
_SMALL = tl.constexpr(2.0**-90)


@triton.jit
def inverse_of(scale, inverted: tl.constexpr):
    """Return 1 / scale as torch has it: divided in float64, rounded to float32."""
    if not inverted:
        scale = (1.0 / scale.to(tl.float64)).to(tl.float32)
    return scale


@triton.jit
def _magnitude(x):
    """Return magnitudes as integers that sort as they do: infinity above, NaN on top.

    An ordinary maximum loses NaN.
    """
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def _wide(x):
    """Return numbers in the precision in which they are squared."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return x


@triton.jit
def _place(address, dtype: tl.constexpr, aligned: tl.constexpr):
    """Return the address of a tensor as a pointer to its numbers."""
    place = address.to(tl.pointer_type(dtype))
    if aligned:
        # Without this promise no load is wider than one number.
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def _read_chunk(
    address,
    first,
    count,
    inverse,
    dtype: tl.constexpr,
    write: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
    loops: tl.constexpr,
):
    """Return the sum of squares and the largest magnitude of a chunk, in float64.

    With `write` every number is multiplied by `inverse` and stored; what is returned
    is of the numbers as they came.
    """
    place = _place(address, dtype, aligned) + first
    lane = tl.arange(0, block)
    left = count - first
    precise: tl.constexpr = dtype == tl.float64
    squares = tl.zeros([block], tl.float64 if precise else tl.float32)
    top = tl.zeros([block], tl.int64 if precise else tl.int32)
    if left >= block * loops:
        # No mask, which would keep loads from being wide.
        for loop in tl.static_range(loops):
            x = tl.load(place + (loop * block + lane))
            value = _wide(x)
            squares += value * value
            top = tl.maximum(top, _magnitude(x))
            if write:
                tl.store(place + (loop * block + lane), (value * inverse).to(dtype))
    else:
        for loop in range(tl.cdiv(left, block)):
            at = loop * block + lane
            x = tl.load(place + at, mask=at < left, other=0.0)
            value = _wide(x)
            squares += value * value
            top = tl.maximum(top, _magnitude(x))
            if write:
                tl.store(place + at, (value * inverse).to(dtype), mask=at < left)
    largest = tl.max(top)
    total = tl.sum(squares).to(tl.float64)
    if precise:
        amax = largest.to(tl.float64, bitcast=True)
    else:
        amax = largest.to(tl.float32, bitcast=True).to(tl.float64)
        # Squares beyond float32, either way: once more, in float64. Gradients that one
        # meets do not come here, so the second read costs nothing.
        overflowed = (total == float("inf")) & (amax < float("inf"))
        vanished = (total < _SMALL) & (amax > 0.0)
        if overflowed | vanished:
            tl.debug_barrier()  # another thread may have written what is read again
            exact = tl.zeros([block], tl.float64)
            for loop in range(tl.cdiv(tl.minimum(left, block * loops), block)):
                at = loop * block + lane
                x = tl.load(place + at, mask=at < left, other=0.0).to(tl.float64)
                if write:
                    # As they were, but for rounding: nobody clips by this norm.
                    x = x / inverse.to(tl.float64)
                exact += x * x
            total = tl.sum(exact)
    return total, amax


@triton.jit
def read(
    pointers,
    counts,
    kinds,
    chunk_tensors,
    chunk_numbers,
    scale_pointer,
    sums,
    tops,
    dtype: tl.constexpr,
    mixed: tl.constexpr,
    inverted: tl.constexpr,
    write: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
    loops: tl.constexpr,
):
    """Write the sum of squares and the largest magnitude of each chunk.

    Args:
        pointers: Where each tensor is, int64.
        counts: How many numbers each has, int64.
        kinds: The kind of each; read only if they are mixed.
        chunk_tensors: Which tensor each chunk is of, int32.
        chunk_numbers: Which chunk of that tensor it is, int32.
        scale_pointer: The scale, or its inverse if `inverted`; read only to write.
        sums: Where the sums of squares go, float64.
        tops: Where the largest magnitudes go, float64.
        dtype: That of all tensors, if they are not mixed.
        mixed: Whether the tensors are of several kinds.
        inverted: Whether `scale_pointer` holds the inverse.
        write: Whether to multiply the gradients by the inverse, in place.
        aligned: Whether every tensor starts at a multiple of 16 bytes.
        block: How many numbers are taken at a time.
        loops: How many blocks a chunk has.
    """
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensors + program)
    first = tl.load(chunk_numbers + program).to(tl.int64) * (block * loops)
    address = tl.load(pointers + tensor)
    count = tl.load(counts + tensor)
    inverse = inverse_of(tl.load(scale_pointer), inverted)
    kind = tl.load(kinds + tensor) if mixed else 0
    # fmt: off
    if not mixed:
        total, top = _read_chunk(
            address, first, count, inverse, dtype, write, aligned, block, loops)
    elif kind == 0:
        total, top = _read_chunk(
            address, first, count, inverse, tl.float32, write, aligned, block, loops)
    elif kind == 1:
        total, top = _read_chunk(
            address, first, count, inverse, tl.float16, write, aligned, block, loops)
    elif kind == 2:
        total, top = _read_chunk(
            address, first, count, inverse, tl.bfloat16, write, aligned, block, loops)
    else:
        total, top = _read_chunk(
            address, first, count, inverse, tl.float64, write, aligned, block, loops)
    # fmt: on
    tl.store(sums + program, total)
    tl.store(tops + program, top)


@triton.jit
def _multiply_chunk(
    address,
    first,
    count,
    factor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
    loops: tl.constexpr,
):
    """Multiply a chunk, in place."""
    place = _place(address, dtype, aligned) + first
    lane = tl.arange(0, block)
    left = count - first
    if left >= block * loops:
        for loop in tl.static_range(loops):
            at = loop * block + lane
            tl.store(place + at, (_wide(tl.load(place + at)) * factor).to(dtype))
    else:
        for loop in range(tl.cdiv(left, block)):
            at = loop * block + lane
            x = _wide(tl.load(place + at, mask=at < left, other=0.0))
            tl.store(place + at, (x * factor).to(dtype), mask=at < left)


@triton.jit
def multiply(
    pointers,
    counts,
    kinds,
    chunk_tensors,
    chunk_numbers,
    factor_pointer,
    dtype: tl.constexpr,
    mixed: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
    loops: tl.constexpr,
):
    """Multiply every tensor by one float32 number, in place; see `read`."""
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensors + program)
    first = tl.load(chunk_numbers + program).to(tl.int64) * (block * loops)
    address = tl.load(pointers + tensor)
    count = tl.load(counts + tensor)
    factor = tl.load(factor_pointer)
    kind = tl.load(kinds + tensor) if mixed else 0
    # fmt: off
    if not mixed:
        _multiply_chunk(address, first, count, factor, dtype, aligned, block, loops)
    elif kind == 0:
        _multiply_chunk(
            address, first, count, factor, tl.float32, aligned, block, loops)
    elif kind == 1:
        _multiply_chunk(
            address, first, count, factor, tl.float16, aligned, block, loops)
    elif kind == 2:
        _multiply_chunk(
            address, first, count, factor, tl.bfloat16, aligned, block, loops)
    else:
        _multiply_chunk(
            address, first, count, factor, tl.float64, aligned, block, loops)
    # fmt: on
