# SPDX-License-Identifier: Apache-2.0
"""`normalize_rows`: float16 rows, normalized with float32 weights by one kernel.

torch's own normalisation wants rows and weights of one dtype on a GPU. With casts
around it float16 rows are read and written three times, twice of it in float32. Here
that happens once. The arithmetic is the same: float32, rounded to float16 at the end.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lossscale.torch import torch_internals
from lossscale.torch.half_precision.casts import NARROW, WeightDtype
from lossscale.torch.inspection import kernel_backend

_LONGEST = 16384
"""The longest row that the kernels take."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_ALIGNMENT = 16
"""In bytes: the kernels read so much at once."""


class RowNorm(NamedTuple):
    """A normalisation of the last dimensions of a tensor."""

    shape: tuple[int, ...]
    """Those dimensions."""
    epsilon: float
    has_mean: bool
    """Whether the mean is subtracted: layer normalisation rather than RMS."""

    def compute(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Normalize by torch's functions, in the dtype of the inputs."""
        if self.has_mean:
            return functional.layer_norm(inputs, self.shape, weight, bias, self.epsilon)
        return functional.rms_norm(inputs, self.shape, weight, self.epsilon)


def can_normalize(
    inputs: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: RowNorm,
    outside: WeightDtype,
) -> bool:
    """Whether the kernels can normalize a tensor.

    They are for code that runs as it is written. A compiler fuses casts by itself, and
    tracers, transforms and modes such as that of `GradScaler.explain` must see torch's
    operators.

    Args:
        inputs: The tensor.
        weight: What multiplies each element of a row.
        bias: What is added to each element of a row.
        norm: The normalisation.
        outside: The dtype that the result must have.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch_internals.is_tracing()
        and not torch_internals.dispatch_modes()
        and not torch_internals.has_transforms()
        and not torch_internals.forward_derivatives()
        and type(inputs) in _PLAIN
        and inputs.dtype in NARROW
        and inputs.dtype is outside.read()
        and inputs.layout is torch.strided
        and not inputs.is_nested
        and inputs.shape[-len(norm.shape) :] == norm.shape
        and 0 < math.prod(norm.shape) <= _LONGEST
        and inputs.numel() > 0
        and kernel_backend.is_usable(inputs.device)
        and _is_readable(weight, inputs.device)
        and _is_readable(bias, inputs.device)
    )


def _is_readable(weight: torch.Tensor | None, device: torch.device) -> bool:
    """Whether the kernels can read a weight or a bias, if there is one."""
    return weight is None or (
        type(weight) in _PLAIN
        and weight.dtype is torch.float32
        and weight.device == device
        and weight.is_contiguous()
        and not weight.data_ptr() % _ALIGNMENT
    )


def normalize_rows(
    inputs: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: RowNorm,
) -> torch.Tensor:
    """Return a normalized tensor in the dtype of the inputs.

    Args:
        inputs: What `can_normalize` accepts.
        weight: What multiplies each element of a row.
        bias: What is added to each element of a row.
        norm: The normalisation.
    """
    outputs: torch.Tensor = _Normalize.apply(inputs, weight, bias, norm)  # type: ignore[no-untyped-call]
    return outputs


class _Normalize(torch.autograd.Function):
    """The kernels, as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: RowNorm,
    ) -> torch.Tensor:
        from lossscale.torch.half_precision.kernels import launch  # noqa: PLC0415

        rows = _as_rows(inputs, norm)
        outputs, statistics = launch.normalize(
            rows, weight, bias, norm.epsilon, has_mean=norm.has_mean
        )
        ctx.save_for_backward(inputs, weight, bias, statistics)
        ctx.norm = norm
        return outputs.view(inputs.shape)

    @staticmethod
    def backward(ctx: Any, output_grads: torch.Tensor) -> Any:
        from lossscale.torch.half_precision.kernels import launch  # noqa: PLC0415

        inputs, weight, bias, statistics = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradients are to be differentiated again
            wanted = (wants_inputs, wants_weight, wants_bias)
            tensors = (inputs, weight, bias)
            return *_differentiate(tensors, wanted, output_grads, ctx.norm), None
        input_grads, weight_grad, bias_grad = launch.normalize_backward(
            _as_rows(inputs, ctx.norm),
            weight,
            _as_rows(output_grads, ctx.norm),
            statistics,
            has_mean=ctx.norm.has_mean,
            wants_weight=wants_weight,
            wants_bias=wants_bias,
        )
        return (
            input_grads.view(inputs.shape) if wants_inputs else None,
            None if weight_grad is None else weight_grad.view(ctx.norm.shape),
            None if bias_grad is None else bias_grad.view(ctx.norm.shape),
            None,
        )


def _as_rows(tensor: torch.Tensor, norm: RowNorm) -> torch.Tensor:
    """Return a tensor as rows without gaps, copied if they are not aligned."""
    rows = tensor.reshape(-1, math.prod(norm.shape)).contiguous()
    return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows


def _differentiate(
    tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    wanted: tuple[bool, bool, bool],
    output_grads: torch.Tensor,
    norm: RowNorm,
) -> list[torch.Tensor | None]:
    """Return gradients that can be differentiated, by torch's functions.

    Args:
        tensors: Inputs, weight and bias.
        wanted: Whose gradients are wanted.
        output_grads: The gradients of the normalized tensor.
        norm: The normalisation.
    """
    inputs, weight, bias = tensors
    wide = norm.compute(inputs.to(torch.float32), weight, bias)
    chosen = [
        tensor
        for tensor, is_wanted in zip(tensors, wanted, strict=True)
        if is_wanted and tensor is not None
    ]
    grads = iter(
        torch.autograd.grad(
            wide.to(inputs.dtype), chosen, output_grads, create_graph=True
        )
    )
    return [
        next(grads) if is_wanted and tensor is not None else None
        for tensor, is_wanted in zip(tensors, wanted, strict=True)
    ]
