# SPDX-License-Identifier: Apache-2.0
"""`PreparedNorm`: float16 rows, normalized with float32 weights by one kernel.

torch's own normalisation wants rows and weights of one dtype on a GPU. With casts
around it float16 rows are read and written three times, twice of it in float32. Here
that happens once. The arithmetic is the same: float32, rounded to float16 at the end.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lossscale.torch import native, torch_internals
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


class PreparedNorm:
    """A normalisation by the kernels, for inputs and weights of one layout.

    Whether the kernels can take tensors is asked once; after that the host's code
    compares their layouts, which takes a tenth of the time.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: RowNorm,
    ) -> None:
        """Choose the kernels.

        Args:
            inputs: What `can_normalize` has accepted.
            weight: What multiplies each element of a row.
            bias: What is added to each element of a row.
            norm: The normalisation.
        """
        from lossscale.torch.half_precision.kernels import launch  # noqa: PLC0415

        columns = norm.columns
        self.norm = norm
        self.kernels = launch.find_kernels(
            launch.RowKind(
                inputs.device,
                inputs.dtype,
                columns,
                launch.find_tile(columns, inputs.numel() // columns),
                norm.epsilon,
                norm.has_mean,
                weight is not None,
                bias is not None,
            )
        )
        self._host = native.load()
        self._has_weight, self._has_bias = weight is not None, bias is not None
        tensors = _present(inputs, weight, bias)
        self._record = b"" if self._host is None else self._host.record(tensors)

    def fits(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        epsilon: float,
    ) -> bool:
        """Whether tensors and epsilon are such as this was prepared for."""
        if self._host is None or epsilon != self.norm.epsilon or _is_watched():
            return False
        if self._has_weight != (weight is not None):
            return False
        if self._has_bias != (bias is not None):
            return False
        change = self._host.compare(_present(inputs, weight, bias), self._record)
        if change == native.MOVED:
            return _is_aligned(weight) and _is_aligned(bias)
        return change == native.SAME

    def normalize(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a normalized tensor in the dtype of the inputs."""
        return _apply(inputs, weight, bias, self)


def prepare(
    inputs: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: RowNorm,
    outside: WeightDtype,
) -> PreparedNorm | None:
    """Return a normalisation by the kernels; `None` if it is left to torch.

    Args:
        inputs: The tensor to normalize.
        weight: What multiplies each element of a row.
        bias: What is added to each element of a row.
        norm: The normalisation.
        outside: The dtype that the result must have.
    """
    if not can_normalize(inputs, weight, bias, norm, outside):
        return None
    return PreparedNorm(inputs, weight, bias, norm)


def can_normalize(
    inputs: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: RowNorm,
    outside: WeightDtype,
) -> bool:
    """Whether the kernels can normalize a tensor; the arguments are those of `prepare`.

    They are for code that runs as it is written. A compiler fuses casts by itself, and
    tracers, transforms and modes such as that of `GradScaler.explain` must see torch's
    operators.
    """
    return (
        not _is_watched()
        and type(inputs) in _PLAIN
        and inputs.dtype in NARROW
        and inputs.dtype is outside.read()
        and inputs.layout is torch.strided
        and not inputs.is_nested
        and not inputs.is_neg()
        and inputs.shape[-len(norm.shape) :] == norm.shape
        and 0 < norm.columns <= _LONGEST
        and inputs.numel() > 0
        and kernel_backend.is_usable(inputs.device)
        and _is_readable(weight, inputs.device)
        and _is_readable(bias, inputs.device)
    )


def _is_watched() -> bool:
    """Whether operators are traced, transformed or seen by a mode."""
    return bool(
        torch_internals.is_tracing()
        or torch_internals.dispatch_modes()
        or torch_internals.has_transforms()
        or torch_internals.forward_derivatives()
    )


def _is_readable(weight: torch.Tensor | None, device: torch.device) -> bool:
    """Whether the kernels can read a weight or a bias, if there is one."""
    return weight is None or (
        type(weight) in _PLAIN
        and weight.dtype is torch.float32
        and weight.device == device
        and weight.is_contiguous()
        and _is_aligned(weight)
    )


def _is_aligned(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not tensor.data_ptr() % _ALIGNMENT


def _present(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


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
        outputs, statistics = kernels.normalize(_as_rows(inputs), weight, bias)
        ctx.save_for_backward(inputs, weight, bias, statistics)
        ctx.prepared = prepared
        return outputs

    @staticmethod
    def backward(ctx: Any, output_grads: torch.Tensor) -> Any:
        inputs, weight, bias, statistics = ctx.saved_tensors
        wanted, prepared = ctx.needs_input_grad[:3], ctx.prepared
        if torch.is_grad_enabled():  # the gradients are to be differentiated again
            tensors = (inputs, weight, bias)
            return *_differentiate(tensors, wanted, output_grads, prepared.norm), None
        input_grads, weight_grad, bias_grad = prepared.kernels.differentiate(
            _as_rows(inputs),
            weight,
            bias,
            _as_rows(output_grads),
            statistics,
            wanted[1:],
        )
        return input_grads if wanted[0] else None, weight_grad, bias_grad, None


# `Function.apply` asks first whether there are transforms, as `_is_watched` has done.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Normalize).apply


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps, copied if it has some or is not aligned."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


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
