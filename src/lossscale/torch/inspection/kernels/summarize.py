# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that makes one summary of what `read` wrote for each chunk.

It writes the layout of `lossscale.torch.inspection.summary`.
"""

# Triton parses this function: it has no types.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0915, SIM108
import triton
import triton.language as tl

from lossscale.torch.inspection.kernels.read import inverse_of

_LANES = tl.constexpr(1024)
_HEADER = tl.constexpr(10)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
_NOT_MEASURED = tl.constexpr(-1.0)


@triton.jit
def _larger(first, second):
    """Return the larger of two magnitudes; NaN is larger than any."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def summarize(
    starts,
    limits,
    bounds,
    sums,
    amaxes,
    tensor_sums,
    tensor_amaxes,
    scale_pointer,
    summary,
    finished,
    tensors,
    max_norm,
    euclid: tl.constexpr,
    clips: tl.constexpr,
    compares_with_bounds: tl.constexpr,
    as_grad_scale: tl.constexpr,
    inverted: tl.constexpr,
):
    """Reduce the chunks of one tensor; the last program to finish writes the header.

    Args:
        starts: The first chunk of each tensor, and one past the last, int32.
        limits: The largest number of each tensor's dtype, float64.
        bounds: The largest unscaled magnitude that the optimizer can hold, float64.
        sums: The chunks' sums of squares, float64.
        amaxes: The chunks' largest magnitudes, float64.
        tensor_sums: Work space: one float64 per tensor.
        tensor_amaxes: The same.
        scale_pointer: The scale, or its inverse if `inverted`.
        summary: Output, float32.
        finished: A counter that is 0 before and after, int32.
        tensors: The number of tensors.
        max_norm: The norm to clip to; infinite for no clipping.
        euclid: Whether the norm is the 2-norm; otherwise it is the largest magnitude.
        clips: Whether to clip to `max_norm`.
        compares_with_bounds: Whether to compare with `bounds`.
        as_grad_scale: Whether the optimizer divides by the resulting `grad_scale`.
        inverted: Whether `scale_pointer` holds the inverse.
    """
    tensor = tl.program_id(0)
    inverse = inverse_of(tl.load(scale_pointer), inverted).to(tl.float64)
    lane = tl.arange(0, _LANES)
    first = tl.load(starts + tensor)
    end = tl.load(starts + tensor + 1)
    sum_lanes = tl.zeros([_LANES], tl.float64)
    amax_lanes = tl.zeros([_LANES], tl.float64)
    for chunk in range(first, end, _LANES):
        mask = chunk + lane < end
        sum_lanes += tl.load(sums + chunk + lane, mask=mask, other=0.0)
        amax_lanes = _larger(
            amax_lanes, tl.load(amaxes + chunk + lane, mask=mask, other=0.0)
        )
    total = tl.sum(sum_lanes)
    amax = tl.reduce(amax_lanes, 0, _larger)
    # Unscaling overflows, or the scale is 0, negative or NaN.
    usable = (amax * inverse <= tl.load(limits + tensor)) & (inverse > 0.0)
    amax = tl.where(usable | (amax != amax), amax, float("inf"))  # noqa: PLR0124
    tl.store(tensor_sums + tensor, total)
    tl.store(tensor_amaxes + tensor, amax)
    # A finite float64 beyond float32 is stored as the largest float32.
    limited = tl.where(
        (amax > _FLOAT32_MAX) & (amax < float("inf")), _FLOAT32_MAX, amax
    )
    tl.store(summary + _HEADER + tensor, limited.to(tl.float32))
    tl.debug_barrier()
    before = tl.atomic_add(finished, 1, sem="acq_rel")
    if before == tensors - 1:
        sum_lanes = tl.zeros([_LANES], tl.float64)
        amax_lanes = tl.zeros([_LANES], tl.float64)
        finite_lanes = tl.zeros([_LANES], tl.float64)
        excess_lanes = tl.zeros([_LANES], tl.float64)
        for start in range(0, tensors, _LANES):
            mask = start + lane < tensors
            # Other programs wrote these: the L1 cache of this one may be stale.
            tensor_sum = tl.load(
                tensor_sums + start + lane, mask=mask, other=0.0, cache_modifier=".cg"
            )
            tensor_amax = tl.load(
                tensor_amaxes + start + lane, mask=mask, other=0.0, cache_modifier=".cg"
            )
            sum_lanes += tensor_sum
            amax_lanes = _larger(amax_lanes, tensor_amax)
            finite_lanes = tl.maximum(
                finite_lanes, tl.where(tensor_amax < float("inf"), tensor_amax, 0.0)
            )
            if compares_with_bounds:
                bound = tl.load(bounds + start + lane, mask=mask, other=1.0)
                excess_lanes = tl.maximum(
                    excess_lanes, tl.where(tensor_amax * inverse > bound, 1.0, 0.0)
                )
        total = tl.sum(sum_lanes)
        amax = tl.reduce(amax_lanes, 0, _larger)
        finite_amax = tl.max(finite_lanes)
        scale = tl.load(scale_pointer).to(tl.float64)
        if inverted:
            scale = 1.0 / scale
        if euclid:
            norm = tl.sqrt(total) / scale
        else:
            norm = amax / scale
        finite = amax < float("inf")
        too_large = tl.max(excess_lanes) > 0.0
        clip = scale * 0.0 + 1.0
        if clips:
            clip = max_norm / (norm + 1e-6)
            clip = tl.where(clip < 1.0, clip, 1.0)
        grad_scale = (scale / clip).to(tl.float32)
        factor = (clip * inverse).to(tl.float32)
        if clips:
            # A norm beyond float32 would clip everything to zero, or to NaN.
            too_large = too_large | (norm > _FLOAT32_MAX)
        too_large = finite & too_large
        if as_grad_scale:
            finite = finite & (too_large | (grad_scale <= _FLOAT32_MAX))
        tl.store(summary, tl.where(finite & (too_large == 0), 0.0, 1.0))
        tl.store(summary + 1, tl.where(amax == amax, 0.0, 1.0))  # noqa: PLR0124
        tl.store(summary + 2, tl.minimum(finite_amax, _FLOAT32_MAX).to(tl.float32))
        tl.store(summary + 3, norm.to(tl.float32))
        tl.store(summary + 4, grad_scale)
        tl.store(summary + 5, factor)
        tl.store(summary + 6, scale.to(tl.float32))
        tl.store(summary + 7, clip.to(tl.float32))
        tl.store(summary + 8, tl.where(too_large, 1.0, 0.0))
        tl.store(summary + 9, _NOT_MEASURED)
        tl.store(finished, 0)
