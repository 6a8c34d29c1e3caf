# SPDX-License-Identifier: Apache-2.0
"""`PreparedNorm`: float16 rows, normalized with float32 weights by one kernel.

torch's own normalisation wants rows and weights of one dtype on a GPU. With casts
around it float16 rows are read and written three times, twice of it in float32. Here
that happens once. Everything is computed in float32 and rounded to float16 at the end.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lossscale.torch import native, torch_internals
from lossscale.torch.half_precision.casts import NARROW
from lossscale.torch.inspection import kernel_backend

_LONGEST = 16384
"""The longest row that the kernels take."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_ALIGNMENT = 16
"""Kernels that read 16 bytes at once are compiled for addresses that are multiples of
16."""


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


class Operands(NamedTuple):
    """What a layer is called with."""

    inputs: torch.Tensor
    """The tensor to normalize."""
    weight: torch.Tensor | None
    """What multiplies each element of a row."""
    bias: torch.Tensor | None
    """What is added to each element of a row."""

    def list_present(self) -> list[torch.Tensor]:
        """Return those that are not `None`."""
        return [tensor for tensor in self if tensor is not None]


class PreparedNorm:
    """A normalisation by the kernels, for operands of one layout.

    Whether the kernels can take them is asked once. After that the C code of `native`
    compares their layouts, in a tenth of the time.
    """

    def __init__(
        self, operands: Operands, norm: RowNorm, code: native.NativeCode
    ) -> None:
        """Choose the kernels.

        Args:
            operands: What `can_normalize` has accepted.
            norm: The normalisation.
            code: The C code of `native`.
        """
        from lossscale.torch.half_precision.kernels import launch  # noqa: PLC0415

        inputs, columns = operands.inputs, norm.columns
        self.norm = norm
        self._has_weight = operands.weight is not None
        self._has_bias = operands.bias is not None
        self.kernels = launch.find_kernels(
            launch.RowKind(
                inputs.device,
                inputs.dtype,
                columns,
                launch.find_tile(columns, inputs.numel() // columns),
                norm.epsilon,
                norm.has_mean,
                self._has_weight,
                self._has_bias,
            )
        )
        self._code = code
        self._record = code.record(operands.list_present())

    def fits(self, operands: Operands, norm: RowNorm, dtype: torch.dtype) -> bool:
        """Whether this was prepared for such operands and for this normalisation.

        Args:
            operands: The operands.
            norm: The normalisation.
            dtype: The dtype that the result must have.
        """
        inputs, weight, bias = operands
        if norm != self.norm or is_watched():
            return False
        if self._has_weight != (weight is not None):
            return False
        if self._has_bias != (bias is not None):
            return False
        change = self._code.compare(operands.list_present(), self._record)
        if change == native.CHANGED or inputs.dtype is not dtype or inputs.is_neg():
            return False
        return change == native.SAME or (_is_aligned(weight) and _is_aligned(bias))

    def normalize(self, operands: Operands) -> torch.Tensor:
        """Return a normalized tensor in the dtype of the inputs."""
        return _apply(*operands, self)

    def __reduce__(self) -> tuple[object, ...]:
        """Leave nothing to a copy or a pickle: it prepares its own."""
        return type(None), ()


def prepare(
    operands: Operands, norm: RowNorm, dtype: torch.dtype
) -> PreparedNorm | None:
    """Return a normalisation by the kernels; `None` if it is left to torch.

    Args:
        operands: The operands.
        norm: The normalisation.
        dtype: The dtype that the result must have.
    """
    if not can_normalize(operands, norm, dtype):
        return None
    # Without a C compiler Triton cannot launch kernels either.
    code = native.load()
    return None if code is None else PreparedNorm(operands, norm, code)


def can_normalize(operands: Operands, norm: RowNorm, dtype: torch.dtype) -> bool:
    """Whether the kernels can normalize a tensor; the arguments are those of `prepare`.

    They are for code that runs as it is written. A compiler fuses casts by itself, and
    `torch.jit.trace`, `torch.func` and modes that are called for every operator, such
    as that of `GradScaler.explain`, must see torch's operators.
    """
    inputs, weight, bias = operands
    return (
        not is_watched()
        and type(inputs) in _PLAIN
        and inputs.dtype in NARROW
        and inputs.dtype is dtype
        and inputs.layout is torch.strided
        and not inputs.is_nested
        and not inputs.is_neg()
        and inputs.shape[-len(norm.shape) :] == norm.shape
        and 0 < norm.columns <= _LONGEST
        and inputs.numel() > 0
        and kernel_backend.is_usable(inputs.device)
        and _is_readable(weight, inputs.device, norm.shape)
        and _is_readable(bias, inputs.device, norm.shape)
    )


def is_watched() -> bool:
    """Whether operators are traced, transformed or passed to a mode."""
    return bool(
        torch_internals.is_tracing()
        or torch_internals.dispatch_modes()
        or torch_internals.has_transforms()
        or torch_internals.forward_derivatives()
    )


def _is_readable(
    weight: torch.Tensor | None, device: torch.device, shape: tuple[int, ...]
) -> bool:
    """Whether the kernels can read a weight or a bias, if there is one."""
    return weight is None or (
        type(weight) in _PLAIN
        and weight.dtype is torch.float32
        and weight.device == device
        and weight.shape == shape
        and weight.is_contiguous()
        and _is_aligned(weight)
    )


def _is_aligned(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not tensor.data_ptr() % _ALIGNMENT


class _Normalize(torch.autograd.Function):
    """The kernels, as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        prepared: PreparedNorm,
    ) -> torch.Tensor:
        kernels = prepared.kernels
        outputs, statistics = kernels.normalize(_as_readable(inputs), weight, bias)
        ctx.save_for_backward(inputs, weight, bias, statistics)
        ctx.prepared = prepared
        return outputs

    @staticmethod
    def backward(ctx: Any, output_grads: torch.Tensor) -> Any:
        inputs, weight, bias, statistics = ctx.saved_tensors
        wanted, prepared = ctx.needs_input_grad[:3], ctx.prepared
        if (
            torch.is_grad_enabled()  # the gradients are to be differentiated again
            or is_watched()
            or torch.compiler.is_compiling()
            or type(output_grads) not in _PLAIN
            or torch_internals.is_batched(output_grads)
        ):
            operands = Operands(inputs, weight, bias)
            return *_differentiate(operands, wanted, output_grads, prepared.norm), None
        input_grads, weight_grad, bias_grad = prepared.kernels.differentiate(
            _as_readable(inputs),
            weight,
            bias,
            _as_readable(output_grads),
            statistics,
            wanted[1:],
        )
        return input_grads if wanted[0] else None, weight_grad, bias_grad, None


# Past `torch.autograd.Function.apply`, which takes as long as a launch to find out that
# there is no transform: `is_watched` has asked already.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Normalize).apply


def _as_readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory the kernels can read as rows, one after the other.

    It is a copy if there are gaps, if elements are negated when they are read, or if
    the tensor does not begin where vectors of elements do.
    """
    tensor = tensor.contiguous()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _differentiate(
    operands: Operands,
    wanted: tuple[bool, bool, bool],
    output_grads: torch.Tensor,
    norm: RowNorm,
) -> list[torch.Tensor | None]:
    """Return the gradients by torch's operators, which can be differentiated again.

    Args:
        operands: The operands.
        wanted: Whose gradients are wanted.
        output_grads: The gradients of the normalized tensor.
        norm: The normalisation.
    """
    inputs, weight, _ = operands
    axes = tuple(range(-len(norm.shape), 0))
    rows = tuple(range(inputs.dim() - len(norm.shape)))
    values, grads = inputs.to(torch.float32), output_grads.to(torch.float32)
    if norm.has_mean:
        values = values - values.mean(axes, keepdim=True)
    variance = values.square().mean(axes, keepdim=True)
    inverse = (variance + norm.epsilon).rsqrt()
    values = values * inverse
    weight_grad, bias_grad = grads * values, grads
    if rows:
        weight_grad, bias_grad = weight_grad.sum(rows), bias_grad.sum(rows)
    if weight is not None:
        grads = grads * weight
    along = (grads * values).mean(axes, keepdim=True)
    if norm.has_mean:
        grads = grads - grads.mean(axes, keepdim=True)
    input_grads = ((grads - values * along) * inverse).to(inputs.dtype)
    results = (input_grads, weight_grad, bias_grad)
    return [
        result if is_wanted else None
        for result, is_wanted in zip(results, wanted, strict=True)
    ]
