# SPDX-License-Identifier: Apache-2.0
"""The update of Adam and AdamW: unscale, decay, moments and weights in one pass.

`prepare_adam` is one small launch: it counts the step of each parameter, unless it is
skipped, and computes in float64 what the update needs of step count and settings.
`apply_adam` reads every element once. Its order of operations is that of torch's fused
kernel for CUDA. That kernel has other scalars: it rounds the betas to float32 and
raises them to the power of the step there, which leaves `1 - beta2**step` few digits at
the first steps. Here they are float64 until the result is rounded, as in torch's
foreach step. Quotients and roots are rounded as IEEE has it.
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
def prepare_adam(
    settings,
    groups,
    steps,
    grads,
    grad_scale,
    found_inf,
    scalars,
    tensors,
    block: tl.constexpr,
):
    """Count the steps, and write what each parameter's update needs.

    Args:
        settings: A row of float64 numbers for each group, as `AdamTables` writes them.
        groups: The group of each parameter, int32.
        steps: The number of steps of each parameter, float32; changed in place.
        grads: The address of each gradient; 0 where there is none.
        grad_scale: What divides the gradients: one float32 number.
        found_inf: 1.0 to skip the step, else 0.0.
        scalars: Output: a row of float32 numbers for each parameter.
        tensors: How many parameters there are.
        block: How many of them a program takes.
    """
    index = tl.program_id(0) * block + tl.arange(0, block)
    in_range = index < tensors
    has_grad = tl.load(grads + index, mask=in_range, other=0) != 0
    applied = tl.where(tl.load(found_inf) == 0.0, 1.0, 0.0)
    step = tl.load(steps + index, mask=in_range, other=0.0)
    step += tl.where(has_grad, applied, 0.0)
    tl.store(steps + index, step, mask=in_range)
    row = settings + tl.load(groups + index, mask=in_range, other=0) * SCALARS
    # Before the first step nothing is updated; 1 keeps the numbers finite.
    count = tl.maximum(step, 1.0).to(tl.float64)
    rate = tl.load(row, mask=in_range, other=0.0)
    correction1 = 1.0 - tl.exp(count * tl.load(row + 1, mask=in_range, other=-1.0))
    correction2 = 1.0 - tl.exp(count * tl.load(row + 2, mask=in_range, other=-1.0))
    decay = tl.load(row + 8, mask=in_range, other=0.0)
    is_decoupled = tl.load(row + 9, mask=in_range, other=0.0) != 0.0
    sign = tl.load(row + 10, mask=in_range, other=1.0).to(tl.float32)
    inverse = invert(grad_scale)
    out = scalars + index * SCALARS
    tl.store(out, inverse * sign, mask=in_range)
    tl.store(out + 1, inverse + tl.zeros([block], tl.float32), mask=in_range)
    tl.store(out + 2, (rate / correction1).to(tl.float32), mask=in_range)
    tl.store(out + 3, tl.sqrt(correction2).to(tl.float32), mask=in_range)
    shrinkage = tl.where(is_decoupled, rate * decay, 0.0)
    tl.store(out + 4, shrinkage.to(tl.float32), mask=in_range)
    penalty = tl.where(is_decoupled, 0.0, decay)
    tl.store(out + 5, penalty.to(tl.float32), mask=in_range)
    tl.store(out + 11, step, mask=in_range)
    for column in tl.static_range(3, 8):
        value = tl.load(row + column, mask=in_range, other=0.0)
        tl.store(out + column + 3, value.to(tl.float32), mask=in_range)


@triton.jit
def _round_stochastically(values, index, step):
    """Return float32 numbers that bfloat16 has, as `rounding.py` does and explains.

    Args:
        values: The numbers.
        index: Their positions in memory, int64.
        step: The number of the step, float32.
    """
    shift = step.to(tl.int64) * 0x9E3779B9 + tl.zeros_like(index)
    bits = index.to(tl.uint32) ^ ((index >> 32).to(tl.uint32) * 0x85EBCA6B)
    bits += shift.to(tl.uint32)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    noise = bits >> 16
    rounded = (values.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    rounded = rounded.to(tl.float32, bitcast=True)
    return tl.where(values == values, rounded, values)  # noqa: PLR0124  # not NaN


@triton.jit
def _update(
    pointers,
    tensor,
    address,
    first,
    left,
    scalars,
    sums,
    dtype: tl.constexpr,
    grad_dtype: tl.constexpr,
    moments: tl.constexpr,
    master: tl.constexpr,
    amsgrad: tl.constexpr,
    stochastic: tl.constexpr,
    write_back: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
    measure: tl.constexpr,
):
    """Update a chunk of one tensor."""
    row = scalars + tensor * SCALARS
    lane = tl.arange(0, block)
    grad_pointer = typed(address, grad_dtype, aligned) + first
    param_pointer = pointer_to(pointers, tensor, 0, dtype, aligned) + first
    mean_pointer = pointer_to(pointers, tensor, 1, moments, aligned) + first
    square_pointer = pointer_to(pointers, tensor, 2, moments, aligned) + first
    stored = read(grad_pointer, lane, left, masked)
    if write_back:
        write(grad_pointer, lane, left, stored * tl.load(row + 1), grad_dtype, masked)
    if master:
        master_pointer = pointer_to(pointers, tensor, 4, tl.float32, aligned) + first
        weight = read(master_pointer, lane, left, masked)
    else:
        weight = read(param_pointer, lane, left, masked)
    start = weight
    mean = read(mean_pointer, lane, left, masked)
    square = read(square_pointer, lane, left, masked)
    grad = stored * tl.load(row)
    weight = multiply_add(-tl.load(row + 4), weight, weight)
    grad = multiply_add(tl.load(row + 5), weight, grad)
    mean = multiply_add(tl.load(row + 6), mean, tl.load(row + 7) * grad)
    square = multiply_add(tl.load(row + 8), square, tl.load(row + 9) * (grad * grad))
    divisor = square
    if amsgrad:
        largest_pointer = pointer_to(pointers, tensor, 3, moments, aligned) + first
        divisor = tl.maximum(
            read(largest_pointer, lane, left, masked), square, tl.PropagateNan.ALL
        )
        write(largest_pointer, lane, left, divisor, moments, masked)
    root = tl.div_rn(tl.sqrt_rn(divisor), tl.load(row + 3) + tl.zeros_like(divisor))
    denominator = root + tl.load(row + 10)
    quotient = tl.div_rn(tl.load(row + 2) * mean, denominator)
    weight = weight - quotient
    if measure:
        before = read(param_pointer, lane, left, masked) if master else start
        update = multiply_add(-tl.load(row + 4), start, -quotient)
        after = saturate(weight, dtype).to(dtype).to(tl.float32)
        measure_update(sums, update, start, before, after, lane, left, masked)
    write(mean_pointer, lane, left, mean, moments, masked)
    if stochastic and moments == tl.bfloat16:
        square = _round_stochastically(square, first + lane, tl.load(row + 11))
    write(square_pointer, lane, left, square, moments, masked)
    if master:
        write(master_pointer, lane, left, weight, tl.float32, masked)
    write(param_pointer, lane, left, saturate(weight, dtype), dtype, masked)


@triton.jit
def apply_adam(
    pointers,
    grads,
    counts,
    kinds,
    starts,
    chunk_tensors,
    scalars,
    found_inf,
    sums,
    dtype: tl.constexpr,
    grad_dtype: tl.constexpr,
    moments: tl.constexpr,
    master: tl.constexpr,
    amsgrad: tl.constexpr,
    other_dtype: tl.constexpr,
    other_grad_dtype: tl.constexpr,
    other_moments: tl.constexpr,
    other_master: tl.constexpr,
    other_amsgrad: tl.constexpr,
    mixed: tl.constexpr,
    stochastic: tl.constexpr,
    write_back: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
    measure: tl.constexpr,
):
    """Update one chunk, unless the step is skipped or there is no gradient.

    Args:
        pointers: A row of addresses for each parameter: itself, both moments, the
            largest second moment, the master.
        grads: The address of each gradient; 0 where there is none.
        counts: How many elements each parameter has, int64.
        kinds: 1 for parameters of the other kind; read only if they are mixed.
        starts: The first chunk of each parameter, int32.
        chunk_tensors: The parameter that each chunk belongs to, int32.
        scalars: What `prepare_adam` has written.
        found_inf: 1.0 to skip the step, else 0.0.
        sums: Output of a measured step: a row of float64 numbers for each chunk.
        dtype: The dtype of the parameters.
        grad_dtype: The dtype of their gradients: the same, or float32.
        moments: The dtype of the moments.
        master: Whether there are float32 masters.
        amsgrad: Whether the largest second moment divides.
        other_dtype: The same five of the other kind of parameters.
        other_grad_dtype: Of the other kind.
        other_moments: Of the other kind.
        other_master: Of the other kind.
        other_amsgrad: Of the other kind.
        mixed: Whether there are parameters of the other kind.
        stochastic: Whether second moments in bfloat16 are rounded stochastically.
        write_back: Whether to write the unscaled gradients.
        aligned: Whether every tensor starts at a multiple of 16 bytes.
        block: How many elements a chunk has.
        measure: Whether to measure what is added to the weights.
    """
    if tl.load(found_inf) == 0.0:
        # The check has read the last gradients last: they may still be in the cache.
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        tensor = tl.load(chunk_tensors + program).to(tl.int64)
        address = tl.load(grads + tensor)
        if address != 0:
            first = (program - tl.load(starts + tensor)).to(tl.int64) * block
            left = tl.load(counts + tensor) - first
            kind = tl.load(kinds + tensor) if mixed else 0
            slots = sums + program * SUMS
            # fmt: off
            if kind == 0:
                if left >= block:
                    _update(
                        pointers, tensor, address, first, left, scalars, slots, dtype,
                        grad_dtype, moments, master, amsgrad, stochastic, write_back,
                        aligned, False, block, measure)
                else:
                    _update(
                        pointers, tensor, address, first, left, scalars, slots, dtype,
                        grad_dtype, moments, master, amsgrad, stochastic, write_back,
                        aligned, True, block, measure)
            elif left >= block:
                _update(
                    pointers, tensor, address, first, left, scalars, slots, other_dtype,
                    other_grad_dtype, other_moments, other_master, other_amsgrad,
                    stochastic, write_back, aligned, False, block, measure)
            else:
                _update(
                    pointers, tensor, address, first, left, scalars, slots, other_dtype,
                    other_grad_dtype, other_moments, other_master, other_amsgrad,
                    stochastic, write_back, aligned, True, block, measure)
            # fmt: on
