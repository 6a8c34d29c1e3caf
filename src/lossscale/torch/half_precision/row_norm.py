# SPDX-License-Identifier: Apache-2.0
"""`normalize_rows`: float16 rows, normalized with float32 weights by one kernel.

torch's own normalisation wants rows and weights of one dtype on a GPU. With casts
around it float16 rows are read and written three times, twice of it in float32. Here
that happens once. The arithmetic is the same: float32, rounded to float16 at the end.
"""

import math
from collections.abc import Sequence
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

    @property
    def columns(self) -> int:
        """How many numbers are normalized together."""
        return self.shape[0] if len(self.shape) == 1 else math.prod(self.shape)

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
        and 0 < norm.columns <= _LONGEST
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

        rows, columns = _as_rows(inputs), norm.columns
        kernels = launch.find_kernels(
            launch.RowKind(
                rows.device,
                rows.dtype,
                columns,
                launch.find_tile(columns, rows.numel() // columns),
                norm.epsilon,
                norm.has_mean,
                weight is not None,
                bias is not None,
            )
        )
        outputs, statistics = kernels.normalize(rows, weight, bias)
        ctx.save_for_backward(inputs, weight, bias, statistics)
        ctx.norm, ctx.kernels = norm, kernels
        return outputs

    @staticmethod
    def backward(ctx: Any, output_grads: torch.Tensor) -> Any:
        inputs, weight, bias, statistics = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias, _ = ctx.needs_input_grad
        norm: RowNorm = ctx.norm
        if torch.is_grad_enabled():  # the gradients are to be differentiated again
            wanted = (wants_inputs, wants_weight, wants_bias)
            tensors = (inputs, weight, bias)
            return *_differentiate(tensors, wanted, output_grads, norm), None
        input_grads, totals = ctx.kernels.differentiate(
            _as_rows(inputs),
            weight,
            _as_rows(output_grads),
            statistics,
            (wants_weight, wants_bias),
        )
        weight_grad = bias_grad = None
        if totals is not None:
            weight_grad, bias_grad = _split(totals, norm)
        return (
            input_grads if wants_inputs else None,
            weight_grad if wants_weight else None,
            bias_grad if wants_bias else None,
            None,
        )


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps, copied if it has some or is not aligned."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _split(totals: torch.Tensor, norm: RowNorm) -> Sequence[torch.Tensor]:
    """Return the two rows of gradients in the shape of the weights."""
    if totals.shape[1] != norm.columns:
        totals = totals[:, : norm.columns]
    grads = totals.unbind()
    return grads if len(norm.shape) == 1 else [x.view(norm.shape) for x in grads]


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
