# SPDX-License-Identifier: Apache-2.0
"""The update of SGD: unscale, decay, momentum and weights in one pass.

A momentum buffer starts at zero, which is torch's first step unless that is dampened:
`plan.py` leaves the first dampened step to torch.
"""

# Triton parses these functions: they have no types, and arguments by position.
# ruff: noqa: ANN001, ANN201, ANN202
import triton
import triton.language as tl

from lossscale.torch.optim.kernels.memory import (
    SCALARS,
    SUMS,
    invert,
    measure_update,
    multiply_add,
    pointer_to,
    read,
    saturate,
    typed,
    write,
)


@triton.jit
def _number(row, column: tl.constexpr):
    """Return a number of a group's settings in float32."""
    return tl.load(row + column).to(tl.float32)


@triton.jit
def _update(
    pointers,
    tensor,
    address,
    first,
    left,
    row,
    inverse,
    sums,
    dtype: tl.constexpr,
    grad_dtype: tl.constexpr,
    buffer_dtype: tl.constexpr,
    master: tl.constexpr,
    momentum: tl.constexpr,
    write_back: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
    measure: tl.constexpr,
):
    """Update a chunk of one tensor."""
    lane = tl.arange(0, block)
    grad_pointer = typed(address, grad_dtype, aligned) + first
    param_pointer = pointer_to(pointers, tensor, 0, dtype, aligned) + first
    stored = read(grad_pointer, lane, left, masked)
    if write_back:
        write(grad_pointer, lane, left, stored * inverse, grad_dtype, masked)
    if master:
        master_pointer = pointer_to(pointers, tensor, 2, tl.float32, aligned) + first
        weight = read(master_pointer, lane, left, masked)
    else:
        weight = read(param_pointer, lane, left, masked)
    grad = stored * (inverse * _number(row, 5))
    grad = multiply_add(_number(row, 3), weight, grad)
    if momentum:
        buffer_pointer = pointer_to(pointers, tensor, 1, buffer_dtype, aligned) + first
        buffer = read(buffer_pointer, lane, left, masked)
        buffer = multiply_add(_number(row, 1), buffer, _number(row, 2) * grad)
        write(buffer_pointer, lane, left, buffer, buffer_dtype, masked)
        # Nesterov adds the momentum once more.
        nesterov_grad = multiply_add(_number(row, 1), buffer, grad)
        grad = tl.where(_number(row, 4) != 0.0, nesterov_grad, buffer)
    start = weight
    weight = multiply_add(-_number(row, 0), grad, weight)
    if measure:
        before = read(param_pointer, lane, left, masked) if master else start
        update = -_number(row, 0) * grad
        after = saturate(weight, dtype).to(dtype).to(tl.float32)
        measure_update(sums, update, start, before, after, lane, left, masked)
    if master:
        write(master_pointer, lane, left, weight, tl.float32, masked)
    write(param_pointer, lane, left, saturate(weight, dtype), dtype, masked)


@triton.jit
def apply_sgd(
    pointers,
    grads,
    counts,
    kinds,
    starts,
    chunk_tensors,
    groups,
    settings,
    grad_scale,
    found_inf,
    sums,
    dtype: tl.constexpr,
    grad_dtype: tl.constexpr,
    buffer_dtype: tl.constexpr,
    master: tl.constexpr,
    momentum: tl.constexpr,
    other_dtype: tl.constexpr,
    other_grad_dtype: tl.constexpr,
    other_buffer_dtype: tl.constexpr,
    other_master: tl.constexpr,
    other_momentum: tl.constexpr,
    mixed: tl.constexpr,
    write_back: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
    measure: tl.constexpr,
):
    """Update one chunk, unless the step is skipped or there is no gradient.

    Args:
        pointers: A row of addresses for each parameter: itself, momentum, master.
        grads: As for `apply_adam`.
        counts: As for `apply_adam`.
        kinds: As for `apply_adam`.
        starts: As for `apply_adam`.
        chunk_tensors: As for `apply_adam`.
        groups: The group of each parameter, int32.
        settings: A row of float64 numbers for each group, as `SgdTables` writes them.
        grad_scale: What divides the gradients: one float32 number.
        found_inf: 1.0 to skip the step, else 0.0.
        sums: As for `apply_adam`.
        dtype: The dtype of the parameters.
        grad_dtype: The dtype of their gradients: the same, or float32.
        buffer_dtype: The dtype of their momentum buffers.
        master: Whether there are float32 masters.
        momentum: Whether there are momentum buffers.
        other_dtype: The same five of the other kind of parameters.
        other_grad_dtype: Of the other kind.
        other_buffer_dtype: Of the other kind.
        other_master: Of the other kind.
        other_momentum: Of the other kind.
        mixed: Whether there are parameters of the other kind.
        write_back: Whether to write the unscaled gradients.
        aligned: Whether every tensor starts at a multiple of 16 bytes.
        block: How many elements a chunk has.
        measure: As for `apply_adam`.
    """
    if tl.load(found_inf) == 0.0:
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        tensor = tl.load(chunk_tensors + program).to(tl.int64)
        address = tl.load(grads + tensor)
        if address != 0:
            first = (program - tl.load(starts + tensor)).to(tl.int64) * block
            left = tl.load(counts + tensor) - first
            row = settings + tl.load(groups + tensor) * SCALARS
            inverse = invert(grad_scale)
            kind = tl.load(kinds + tensor) if mixed else 0
            slots = sums + program * SUMS
            # fmt: off
            if kind == 0:
                if left >= block:
                    _update(
                        pointers, tensor, address, first, left, row, inverse, slots,
                        dtype, grad_dtype, buffer_dtype, master, momentum, write_back,
                        aligned, False, block, measure)
                else:
                    _update(
                        pointers, tensor, address, first, left, row, inverse, slots,
                        dtype, grad_dtype, buffer_dtype, master, momentum, write_back,
                        aligned, True, block, measure)
            elif left >= block:
                _update(
                    pointers, tensor, address, first, left, row, inverse, slots,
                    other_dtype, other_grad_dtype, other_buffer_dtype, other_master,
                    other_momentum, write_back, aligned, False, block, measure)
            else:
                _update(
                    pointers, tensor, address, first, left, row, inverse, slots,
                    other_dtype, other_grad_dtype, other_buffer_dtype, other_master,
                    other_momentum, write_back, aligned, True, block, measure)
            # fmt: on
