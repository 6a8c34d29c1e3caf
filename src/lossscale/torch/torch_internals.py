# SPDX-License-Identifier: Apache-2.0
"""Private functions and attributes of torch that this package relies on, in one place.

Each was there in every version that is supported; a test calls all of them.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import _refresh_per_optimizer_state

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm
foreach_mul: Callable[..., Sequence[torch.Tensor]] = torch._foreach_mul
foreach_neg: Callable[..., Sequence[torch.Tensor]] = torch._foreach_neg
foreach_add: Callable[..., Sequence[torch.Tensor]] = torch._foreach_add
foreach_sqrt: Callable[..., Sequence[torch.Tensor]] = torch._foreach_sqrt
foreach_mul_: Callable[..., None] = torch._foreach_mul_
foreach_div_: Callable[..., None] = torch._foreach_div_
foreach_add_: Callable[..., None] = torch._foreach_add_
foreach_lerp_: Callable[..., None] = torch._foreach_lerp_
foreach_addcmul_: Callable[..., None] = torch._foreach_addcmul_
foreach_addcdiv_: Callable[..., None] = torch._foreach_addcdiv_
foreach_maximum_: Callable[..., None] = torch._foreach_maximum_
foreach_copy_: Callable[..., None] = torch._foreach_copy_

foreach_unscale_: Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], object]
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies tensors by a number, and sets a flag if one is not finite."""

flatten: Callable[[list[torch.Tensor]], torch.Tensor] = (
    torch._utils._flatten_dense_tensors
)
"""Copies the elements of tensors to one tensor of one dimension."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""`torch.no_grad` takes as long as reading ten small tensors does."""

unflatten: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._utils._unflatten_dense_tensors
)
"""Returns views of such a tensor, of the shapes of the tensors that it was made of."""

current_cuda_device: Callable[[], int]
current_cuda_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

is_stream_capturing: Callable[[], bool] = getattr(
    torch._C,
    "_cuda_isCurrentStreamCapturing",
    torch.cuda.is_current_stream_capturing,
)
"""The same as the public functions, without their Python: both are asked several times
a step, after CUDA was initialized by a tensor."""

current_raw_stream: Callable[[int], int] | None
current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Returns the address of a device's current stream; only in builds with CUDA."""

disable_dynamo: Callable[[Callable[..., Any]], Callable[..., Any]] = _disable_dynamo

new_optimizer_state: Callable[[], dict[str, Any]] = _refresh_per_optimizer_state
"""Makes torch's state of one optimizer: READY, without flags."""


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was written to."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the node that the autograd engine evaluates in this thread, or `None`."""

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the sequence number that the next node of this thread's graph will have."""

is_mutable: Callable[[Any], bool] = attrgetter("_schema.is_mutable")
"""Whether an operator writes to one of its arguments."""


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns how many modes see every operator: fake tensors, tracers, counters."""

has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether the code runs inside a transform of `torch.func`."""

is_batched: Callable[[torch.Tensor], bool]
is_batched = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient is several: `torch.autograd.grad(..., is_grads_batched=True)`."""

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether the code is traced by `torch.jit.trace`, or exported to ONNX by it."""


def forward_derivatives() -> bool:
    """Whether the code runs inside `torch.autograd.forward_ad.dual_level`."""
    return torch.autograd.forward_ad._current_level >= 0


def uncoalesced_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, whether it is coalesced or not."""
    return tensor._values()


def local_tensor(dtensor: "DTensor") -> torch.Tensor:
    """Return the shard of a DTensor that this rank has."""
    return dtensor._local_tensor


def finish_collective(shard: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a collective that may not have finished, after a wait."""
    if hasattr(shard, "trigger_wait"):
        return cast("torch.Tensor", cast("Any", shard).wait())
    return shard


def device_types(group: object) -> set[str]:
    """Return the kinds of devices whose tensors a process group can reduce."""
    return {device.type for device in getattr(group, "_device_types", ())}


def guard_class() -> Callable[..., Any] | None:
    """Return the guard on tensors of torch's compiler, if this torch has it."""
    try:
        from torch._C._dynamo.guards import TensorGuards  # noqa: PLC0415
    except ImportError:
        return None
    return cast("Callable[..., Any]", TensorGuards)
