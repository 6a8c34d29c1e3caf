# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that read every gradient: the only expensive part of a step.

One launch covers a list of tensors of any size. `pointers` holds their addresses. A
chunk is a run of consecutive elements of one tensor, and each program takes one chunk.
For every chunk `read` writes the sum of squares and the largest magnitude, which may be
infinity or NaN: one read tells whether the gradients are finite, which of them are not,
and their norm.

The dtypes are float32 (kind 0), float16 (1), bfloat16 (2) or float64 (3). A list of
several dtypes branches on the kind of each tensor; a list of one dtype has no branch.
"""

# Triton parses these functions: they have no types, and arguments by position.
# ruff: noqa: ANN001, ANN201, ANN202, PLR2004
import triton
import triton.language as tl

# A float32 sum of squares below this has lost too much to underflow.
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
def _upcast(x):
    """Return elements in the precision in which they are squared."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return x


@triton.jit
def _pointer(address, dtype: tl.constexpr, aligned: tl.constexpr):
    """Return the address of a tensor as a pointer to its elements."""
    pointer = address.to(tl.pointer_type(dtype))
    if aligned:
        # Without this hint no load is wider than one element.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


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

    With `write` every element is multiplied by `inverse` and stored; the results
    describe the elements before that.
    """
    base = _pointer(address, dtype, aligned) + first
    lane = tl.arange(0, block)
    remaining = count - first
    precise: tl.constexpr = dtype == tl.float64
    squares = tl.zeros([block], tl.float64 if precise else tl.float32)
    amax = tl.zeros([block], tl.int64 if precise else tl.int32)
    if remaining >= block * loops:
        # No mask, which would keep loads from being wide.
        for loop in tl.static_range(loops):
            x = tl.load(base + (loop * block + lane))
            value = _upcast(x)
            squares += value * value
            amax = tl.maximum(amax, _magnitude(x))
            if write:
                tl.store(base + (loop * block + lane), (value * inverse).to(dtype))
    else:
        for loop in range(tl.cdiv(remaining, block)):
            offset = loop * block + lane
            x = tl.load(base + offset, mask=offset < remaining, other=0.0)
            value = _upcast(x)
            squares += value * value
            amax = tl.maximum(amax, _magnitude(x))
            if write:
                tl.store(
                    base + offset, (value * inverse).to(dtype), mask=offset < remaining
                )
    bits = tl.max(amax)
    total = tl.sum(squares).to(tl.float64)
    if precise:
        largest = bits.to(tl.float64, bitcast=True)
    else:
        largest = bits.to(tl.float32, bitcast=True).to(tl.float64)
        # Squares that overflow or underflow float32 are summed again in float64. Usual
        # gradients do not come here, so the second read costs nothing.
        overflowed = (total == float("inf")) & (largest < float("inf"))
        vanished = (total < _SMALL) & (largest > 0.0)
        if overflowed | vanished:
            tl.debug_barrier()  # another thread may have written the element read here
            exact = tl.zeros([block], tl.float64)
            for loop in range(tl.cdiv(tl.minimum(remaining, block * loops), block)):
                offset = loop * block + lane
                x = tl.load(base + offset, mask=offset < remaining, other=0.0).to(
                    tl.float64
                )
                if write:
                    # The original up to rounding: no gradient is clipped by this norm.
                    x = x / inverse.to(tl.float64)
                exact += x * x
            total = tl.sum(exact)
    return total, largest


@triton.jit
def read(
    pointers,
    counts,
    kinds,
    chunk_tensors,
    chunk_numbers,
    scale_pointer,
    sums,
    amaxes,
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
        pointers: The address of each tensor, int64.
        counts: The number of elements of each, int64.
        kinds: The kind of each; read only if they are mixed.
        chunk_tensors: The tensor that each chunk belongs to, int32.
        chunk_numbers: The number of the chunk within its tensor, int32.
        scale_pointer: The scale, or its inverse if `inverted`; read only to write.
        sums: Output: the sums of squares, float64.
        amaxes: Output: the largest magnitudes, float64.
        dtype: The dtype of all tensors, if they are not mixed.
        mixed: Whether the tensors have several dtypes.
        inverted: Whether `scale_pointer` holds the inverse.
        write: Whether to multiply the gradients by the inverse, in place.
        aligned: Whether every tensor starts at a multiple of 16 bytes.
        block: How many elements are taken at a time.
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
        total, amax = _read_chunk(
            address, first, count, inverse, dtype, write, aligned, block, loops)
    elif kind == 0:
        total, amax = _read_chunk(
            address, first, count, inverse, tl.float32, write, aligned, block, loops)
    elif kind == 1:
        total, amax = _read_chunk(
            address, first, count, inverse, tl.float16, write, aligned, block, loops)
    elif kind == 2:
        total, amax = _read_chunk(
            address, first, count, inverse, tl.bfloat16, write, aligned, block, loops)
    else:
        total, amax = _read_chunk(
            address, first, count, inverse, tl.float64, write, aligned, block, loops)
    # fmt: on
    tl.store(sums + program, total)
    tl.store(amaxes + program, amax)


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
    base = _pointer(address, dtype, aligned) + first
    lane = tl.arange(0, block)
    remaining = count - first
    if remaining >= block * loops:
        for loop in tl.static_range(loops):
            offset = loop * block + lane
            tl.store(
                base + offset, (_upcast(tl.load(base + offset)) * factor).to(dtype)
            )
    else:
        for loop in range(tl.cdiv(remaining, block)):
            offset = loop * block + lane
            x = _upcast(tl.load(base + offset, mask=offset < remaining, other=0.0))
            tl.store(base + offset, (x * factor).to(dtype), mask=offset < remaining)


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
    """Multiply every tensor by a float32 number, in place; arguments as for `read`."""
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
