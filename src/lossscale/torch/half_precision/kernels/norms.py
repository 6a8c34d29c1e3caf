# SPDX-License-Identifier: Apache-2.0
"""Normalisation of rows in float16 with float32 weights, forward and backward.

Everything is computed in float32 and rounded once, when it is written. A tile is a few
rows, each as wide as the next power of two. The sums over all rows that the gradients
of the weights are made of are added up in two launches, in an order that depends on the
shape alone, so that results are the same at every run.
"""

# Triton parses these functions: they have no types, and arguments by position.
# ruff: noqa: ANN001, ANN201, ANN202
import triton
import triton.language as tl


@triton.jit
def _read_tile(pointer, row, rows, columns: tl.constexpr, width: tl.constexpr):
    """Return rows in float32, with zeros where there is nothing."""
    column = tl.arange(0, width)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + column
    in_range = (row < rows)[:, None] & (column < columns)
    return tl.load(pointer + offset, mask=in_range, other=0.0).to(tl.float32)


@triton.jit
def _write_tile(
    pointer,
    row,
    rows,
    values,
    columns: tl.constexpr,
    width: tl.constexpr,
    dtype: tl.constexpr,
):
    """Round rows to their dtype and store them."""
    column = tl.arange(0, width)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + column
    in_range = (row < rows)[:, None] & (column < columns)
    tl.store(pointer + offset, values.to(dtype), mask=in_range)


@triton.jit
def _read_weight(pointer, columns: tl.constexpr, width: tl.constexpr):
    """Return one number for each column."""
    column = tl.arange(0, width)
    return tl.load(pointer + column, mask=column < columns, other=0.0)[None, :]


@triton.jit
def _mean_of_rows(values, columns: tl.constexpr):
    """Return the mean of each row, divided as IEEE has it: that of equals is exact."""
    total = tl.sum(values, 1)
    return tl.div_rn(total, tl.zeros_like(total) + columns)


@triton.jit
def _center(values, mean, columns: tl.constexpr, width: tl.constexpr):
    """Return rows without their mean, and zeros in the lanes after the last column."""
    is_column = tl.arange(0, width)[None, :] < columns
    return tl.where(is_column, values - mean[:, None], 0.0)


@triton.jit(do_not_specialize=["rows"])
def normalize(
    inputs,
    weight,
    bias,
    outputs,
    statistics,
    rows,
    dtype: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    epsilon: tl.constexpr,
    has_mean: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
):
    """Normalize a tile of rows.

    Args:
        inputs: The rows, one after the other.
        weight: What multiplies each column, float32; ignored if there is none.
        bias: What is added to each column, float32; ignored if there is none.
        outputs: Output: the normalized rows.
        statistics: Output: the reciprocal standard deviation of each row, float32; then
            the mean of each row, if means are subtracted.
        rows: How many there are.
        dtype: Their dtype.
        columns: How many numbers a row has.
        width: The next power of two.
        tile: How many rows a program takes.
        epsilon: What is added to the variance.
        has_mean: Whether the mean is subtracted, as in layer normalisation.
        has_weight: Whether there is a weight.
        has_bias: Whether there is a bias.
    """
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    values = _read_tile(inputs, row, rows, columns, width)
    if has_mean:
        mean = _mean_of_rows(values, columns)
        values = _center(values, mean, columns, width)
        tl.store(statistics + rows + row, mean, mask=row < rows)
    variance = _mean_of_rows(values * values, columns)
    root = tl.sqrt_rn(variance + epsilon)
    inverse = tl.div_rn(tl.zeros_like(root) + 1.0, root)
    tl.store(statistics + row, inverse, mask=row < rows)
    values = values * inverse[:, None]
    if has_weight:
        values = values * _read_weight(weight, columns, width)
    if has_bias:
        values = values + _read_weight(bias, columns, width)
    _write_tile(outputs, row, rows, values, columns, width, dtype)


@triton.jit(do_not_specialize=["rows"])
def normalize_backward(
    inputs,
    weight,
    output_grads,
    statistics,
    input_grads,
    sums,
    rows,
    dtype: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    has_mean: tl.constexpr,
    has_weight: tl.constexpr,
    wants_weight: tl.constexpr,
    wants_bias: tl.constexpr,
):
    """Write the gradients of the rows, and sums for those of weight and bias.

    Args:
        inputs: As for `normalize`.
        weight: As for `normalize`.
        output_grads: The gradients of the normalized rows.
        statistics: What `normalize` has written.
        input_grads: Output: the gradients of the rows.
        sums: Output: for each program a row of float32 numbers that make the weight
            gradient, and one of the bias gradient; only of what is wanted.
        rows: As for `normalize`.
        dtype: As for `normalize`.
        columns: As for `normalize`.
        width: As for `normalize`.
        tile: How many rows a program takes at a time.
        has_mean: As for `normalize`.
        has_weight: As for `normalize`.
        wants_weight: Whether to write the sums of the weight gradient.
        wants_bias: Whether to write those of the bias gradient.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    weight_sums = tl.zeros([width], tl.float32)
    bias_sums = tl.zeros([width], tl.float32)
    for first in range(program * tile, rows, programs * tile):
        row = first + tl.arange(0, tile)
        values = _read_tile(inputs, row, rows, columns, width)
        grads = _read_tile(output_grads, row, rows, columns, width)
        inverse = tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
        if has_mean:
            mean = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
            values = _center(values, mean, columns, width)
        values = values * inverse
        if wants_weight:
            weight_sums += tl.sum(grads * values, 0)
        if wants_bias:
            bias_sums += tl.sum(grads, 0)
        if has_weight:
            grads = grads * _read_weight(weight, columns, width)
        along = _mean_of_rows(grads * values, columns)[:, None]
        if has_mean:
            grads = _center(grads, _mean_of_rows(grads, columns), columns, width)
        grads = (grads - values * along) * inverse
        _write_tile(input_grads, row, rows, grads, columns, width, dtype)
    column = tl.arange(0, width)
    out = sums + program * (wants_weight + wants_bias) * columns + column
    if wants_weight:
        tl.store(out, weight_sums, mask=column < columns)
    if wants_bias:
        tl.store(out + wants_weight * columns, bias_sums, mask=column < columns)


@triton.jit(do_not_specialize=["programs"])
def add_sums(
    sums,
    first_grad,
    second_grad,
    programs,
    columns: tl.constexpr,
    kinds: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
):
    """Add up the sums of all programs.

    Args:
        sums: What `normalize_backward` has written.
        first_grad: Output: what the first row of each program adds up to.
        second_grad: Output: what the second row adds up to, if there are two.
        programs: How many programs there were.
        columns: The length of a row.
        kinds: How many rows a program has written.
        tile: How many rows are added up at a time.
        width: How many columns a program takes.
    """
    parts: tl.constexpr = (columns + width - 1) // width
    kind = tl.program_id(0) // parts
    column = (tl.program_id(0) % parts) * width + tl.arange(0, width)
    total = tl.zeros([width], tl.float32)
    for first in range(0, programs, tile):
        row = first + tl.arange(0, tile)
        offset = (kinds * row[:, None] + kind) * columns + column[None, :]
        in_range = (row < programs)[:, None] & (column < columns)[None, :]
        total += tl.sum(tl.load(sums + offset, mask=in_range, other=0.0), 0)
    if kind == 0:
        tl.store(first_grad + column, total, mask=column < columns)
    else:
        tl.store(second_grad + column, total, mask=column < columns)
