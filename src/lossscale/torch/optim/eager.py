# SPDX-License-Identifier: Apache-2.0
"""A step by torch's own functions: on any device, and what the kernels are tested by.

The update itself is torch's (`torch.optim.adam.adam`, `torch.optim.sgd.sgd`). This file
unscales the gradients into new tensors, computes in float32 where a dtype is too narrow
for that, and returns the results to the tensors that the optimizer keeps.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.optim.rounding import round_stochastically_

_SMALL = 2**14
"""Below so many elements a tensor, torch's foreach step is the faster one on a CPU."""


class HostScale(NamedTuple):
    """`grad_scale` and `found_inf` as numbers of the host."""

    is_skipped: bool
    """Whether the step must change nothing."""
    inverse: float | None
    """What the gradients are multiplied by; `None` if they carry no scale."""
    has_scaler: bool = False
    """Whether a scaler takes the step, also if it has unscaled the gradients before."""


def read_scale(
    grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
) -> HostScale:
    """Read what a scaler has set on the optimizer; waits for the device."""
    is_skipped = found_inf is not None and bool(found_inf)
    inverse = None
    if grad_scale is not None and not is_skipped:
        # As torch.amp.GradScaler inverts it.
        inverse = grad_scale.double().reciprocal().float().item()
    return HostScale(is_skipped, inverse, found_inf is not None)


def unscale(
    grad: torch.Tensor, inverse: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return a gradient without its scale, in a dtype; the gradient is left as it is.

    Without a scale and in its own dtype it is the gradient itself.
    """
    wide = grad if grad.dtype == dtype else grad.to(dtype)
    return wide if inverse is None else wide * inverse


def working_dtype(
    weight: torch.Tensor, scale: HostScale, kept: list[torch.dtype]
) -> torch.dtype:
    """Return the dtype in which a weight is updated.

    It is the weight's own, as in torch, unless that is a half-precision one and the
    step is a scaler's, or the moments have another one. Then the update is made in
    float32, as torch's fused optimizers and the kernels make it: in float16 the epsilon
    of Adam is zero.

    Args:
        weight: The master, or the parameter itself.
        scale: What a scaler has set.
        kept: The dtypes of the moments.
    """
    dtype = weight.dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    is_scaled = scale.has_scaler or scale.inverse is not None
    if is_half and (is_scaled or any(other != dtype for other in kept)):
        return torch.float32
    return dtype


def write_weight(param: torch.Tensor, weight: torch.Tensor) -> None:
    """Round a weight to the dtype of its parameter.

    What is beyond the range of float16 becomes its largest number: an infinite weight
    would make every loss from then on infinite or NaN.
    """
    largest = torch.finfo(param.dtype).max
    param.copy_(weight.clamp(-largest, largest))


class Workspace:
    """Tensors of a working dtype in place of those that an optimizer keeps.

    A tensor that has the dtype already is used as it is; of any other a copy is made,
    and `write` rounds the results back.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Copies that are rounded stochastically, and the steps they belong to."""

    def open(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a moment in a dtype."""
        return self._open(tensor, dtype, self._copies)

    def open_square(
        self, square: torch.Tensor, dtype: torch.dtype, step: torch.Tensor
    ) -> torch.Tensor:
        """Return a second moment in a dtype; `write` rounds it stochastically.

        Args:
            square: The moment, in bfloat16.
            dtype: A wider dtype.
            step: Counts the steps.
        """
        copy = self.open(square, dtype)
        self._steps.append((copy, step))
        return copy

    def open_weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight in a dtype."""
        return self._open(weight, dtype, self._weights)

    @staticmethod
    def _open(
        tensor: torch.Tensor,
        dtype: torch.dtype,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        if tensor.dtype == dtype:
            return tensor
        copy = tensor.to(dtype)
        copies.append((tensor, copy))
        return copy

    def write(self) -> None:
        """Write the results to the tensors that the optimizer keeps."""
        rounded = {}
        for copy, step in self._steps:
            own = local_shard(copy).to(torch.float32)
            round_stochastically_(own, step)
            rounded[id(copy)] = own
        for tensor, copy in self._copies:
            if id(copy) in rounded:
                local_shard(tensor).copy_(rounded[id(copy)])
            else:
                tensor.copy_(copy)
        for weight, copy in self._weights:
            write_weight(weight, copy)


def has_duplicates(weights: list[torch.Tensor]) -> bool:
    """Whether a weight is there twice: it is updated once after the other."""
    return len(set(map(id, weights))) < len(weights)


def choose_foreach(
    group: Mapping[str, Any], weights: list[torch.Tensor]
) -> bool | None:
    """Return torch's argument: `True` for many small tensors of a CPU.

    torch chooses a loop over the tensors there, whatever their sizes. For float32 and
    float64 both give the same bits. `False`, that loop, if a tensor is there twice.
    """
    chosen: bool | None = group["foreach"]
    numbers = (group["lr"], *group.get("betas", ()))
    if chosen is not None or group["fused"]:
        return chosen
    if has_duplicates(weights):
        # A foreach operation of a GPU updates both at the same time.
        return False
    if any(map(torch.is_tensor, numbers)):
        return None
    are_plain = all(
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.is_cpu
        and weight.dtype in (torch.float32, torch.float64)
        for weight in weights
    )
    elements = sum(weight.numel() for weight in weights)
    is_small = elements < _SMALL * len(weights)
    # Otherwise torch chooses by itself: for a GPU it takes the foreach step.
    return True if are_plain and is_small else None
