# SPDX-License-Identifier: Apache-2.0
"""`GradientGroups`: the gradients of an optimizer, grouped by what can read them.

The groups are made when the layout of the gradients changes, and kept as long as it
stays. A group has one device, one backend and one sharding: the Triton kernels read
what they can, torch's own operations the rest (sparse, complex, strided with gaps,
other devices). Of a DTensor the shard of this rank is read; other tensor subclasses are
left to torch.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

from lossscale.errors import ContextError
from lossscale.torch.devices import is_capturing
from lossscale.torch.inspection import eager, host, kernel_backend
from lossscale.torch.inspection.layout_cache import (
    AddressedLayout,
    layout_of,
    version_of,
)
from lossscale.torch.inspection.request import LIMITS, InspectionRequest
from lossscale.torch.inspection.summary import (
    FOUND_INF,
    HEADER,
    GradientSummary,
)
from lossscale.torch.torch_internals import uncoalesced_values

if TYPE_CHECKING:
    from lossscale.torch.inspection.kernels.launch import GroupKernels, Tables

Sharding = tuple[int, ...]
"""The process groups of a reduction plan over which a gradient is sharded; empty if
every rank has all of it."""

FoundInf = dict[torch.device, torch.Tensor]
"""torch's `found_inf_per_device`: 0.0 or 1.0 for each device."""


class GradientScale(NamedTuple):
    """The scale by which gradients are multiplied, or its inverse."""

    scale: torch.Tensor | None
    inverse: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The scale, or its inverse where only that is given."""
        tensor = self.inverse if self.scale is None else self.scale
        if tensor is None:
            message = "neither the scale nor its inverse is given"
            raise AssertionError(message)
        return tensor

    def scale_and_inverse(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and its inverse."""
        if self.inverse is None:
            return self.tensor, invert(self.tensor)
        return invert(self.inverse) if self.scale is None else self.scale, self.inverse

    def on_host(self) -> tuple[float, float]:
        """Return both as Python numbers."""
        number: float = self.tensor.item()
        inverse = host.invert(number)
        return (number, inverse) if self.inverse is None else (inverse, number)


class Group(NamedTuple):
    """Gradients that are read together."""

    device: torch.device
    indices: list[int]
    """Their positions among all gradients."""
    kernels: "GroupKernels | None"
    """`None` where torch's operations read them."""
    is_dense: bool
    """Whether they are strided real tensors."""
    sharding: Sharding


class GradientGroups:
    """The gradients of one optimizer, in groups."""

    def __init__(
        self,
        grads: list[torch.Tensor],
        kept_tables: "list[Tables]",
        shardings: list[Sharding] | None = None,
    ) -> None:
        """Group gradients.

        Args:
            grads: The gradients; of DTensors, the shards of this rank.
            kept_tables: Where to keep the tables that a CUDA graph will read.
            shardings: The sharding of each of them, if other ranks have shards of them.
        """
        self.kept_tables = kept_tables
        self.layout = layout_of(grads)
        self.addressed: AddressedLayout | None = None
        """The layout, if it has their addresses as well."""
        if isinstance(self.layout, AddressedLayout):
            self.addressed = self.layout
        self.count = len(grads)
        self.shardings = shardings
        self.is_overlapping = any(map(_is_overlapping, grads))
        self.is_foreign = any(not _is_plain(grad) for grad in grads)
        """Whether a gradient is of a tensor subclass that only torch can unscale."""
        self.half_indices = [
            index for index, grad in enumerate(grads) if grad.dtype is torch.float16
        ]
        self.may_be_refused = bool(self.half_indices) or self.is_overlapping
        """Whether they cannot be unscaled in place, or only if that is allowed."""
        self.has_sparse = any(grad.layout is torch.sparse_coo for grad in grads)
        self.groups: list[Group] = []
        self.bounds: list[float] = []
        """What each gradient may be once unscaled; see `headroom.py`."""
        self.states_seen: int | None = None
        """How many parameters had an optimizer state when the bounds were set."""
        self._orders: dict[torch.device, torch.Tensor] = {}
        self._reader: host.HostReader | None = None
        self.dense_reader: host.HostReader | None = None
        """Reads the gradients if all are dense and in the host's memory: then there is
        nothing else to do."""
        if self.is_foreign:
            return
        self.bounds = [LIMITS[to_dense(grad).dtype] for grad in grads]
        indices: dict[tuple[torch.device, bool, Sharding], list[int]]
        indices = defaultdict(list)
        for index, grad in enumerate(grads):
            readable = kernel_backend.can_read(grad)
            sharding = () if shardings is None else shardings[index]
            indices[grad.device, readable, sharding].append(index)
        for (device, readable, sharding), members in indices.items():
            kernels = None
            if readable:
                bounds = [self.bounds[index] for index in members]
                kernels = kernel_backend.make_kernels(kept_tables, bounds)
            is_dense = all(_is_dense(grads[index]) for index in members)
            self.groups.append(Group(device, members, kernels, is_dense, sharding))
        self.is_single = len(self.groups) == 1
        first = self.groups[0] if self.groups else None
        if first is None or not self.is_single or first.kernels is not None:
            return
        if first.device.type == "cpu":
            self._reader = host.HostReader(first.device)
            self.dense_reader = self._reader if first.is_dense else None

    def set_bounds(self, bounds: list[float]) -> None:
        """Set what each gradient may be once unscaled."""
        if bounds == self.bounds:
            return
        self.bounds = bounds
        if self._reader is not None:
            self._reader.forget_layout()
        for group in self.groups:
            if group.kernels is not None:
                group.kernels.set_bounds([bounds[index] for index in group.indices])

    # -- measuring ---------------------------------------------------------------------

    def measure(
        self,
        grads: list[torch.Tensor],
        gradient_scale: GradientScale,
        request: InspectionRequest,
    ) -> tuple[GradientSummary, FoundInf]:
        """Return the summary of all gradients, and the flag of each device.

        Args:
            grads: Gradients of the layout that these groups were made for.
            gradient_scale: The scale that they were multiplied by.
            request: What to measure.
        """
        if self._reader is None:
            buffers = self.measure_groups(grads, gradient_scale, request)
            return self.merge(buffers, gradient_scale.tensor.device, request)
        group_grads = self._select(self.groups[0], grads)
        return self._reader.measure(group_grads, gradient_scale, request, self.bounds)

    def measure_groups(
        self,
        grads: list[torch.Tensor],
        gradient_scale: GradientScale,
        request: InspectionRequest,
    ) -> list[torch.Tensor]:
        """Return the buffer of the summary of each group.

        If there are several, nothing is clipped yet: that takes the norm of all.
        """
        group_request = request if self.is_single else request.for_group()
        buffers = []
        for group in self.groups:
            group_grads = self._select(group, grads)
            if group.kernels is not None:
                number = gradient_scale.tensor
                if number.device != group.device:
                    number = number.to(group.device, non_blocking=True)
                inverted = gradient_scale.scale is None
                buffer = group.kernels.measure(
                    group_grads,
                    number,
                    group_request,
                    inverted=inverted,
                    version=version_of(self.layout),
                )
            else:
                bounds = [self.bounds[index] for index in group.indices]
                buffer = _measure_eagerly(
                    group_grads, group.device, gradient_scale, group_request, bounds
                )
            buffers.append(buffer)
        return buffers

    def merge(
        self,
        buffers: list[torch.Tensor],
        device: torch.device,
        request: InspectionRequest,
    ) -> tuple[GradientSummary, FoundInf]:
        """Return the summary of all groups from theirs, and the flag of each device."""
        if self.is_single:
            summary = GradientSummary(buffers[0], None, None, self.bounds)
            return summary, {self.groups[0].device: buffers[0][FOUND_INF]}
        return self.reorder(eager.combine(buffers, device, request))

    def reorder(self, buffer: torch.Tensor) -> tuple[GradientSummary, FoundInf]:
        """Return a summary whose tensors are in the optimizer's order, and the flags.

        `eager.combine` returns them in the order of the groups.
        """
        if not self.is_single:
            order = self._order_on(buffer.device)
            buffer = torch.cat([buffer[:HEADER], buffer[HEADER:][order]])
        # Each device gets a flag of its own, because callers may write to it.
        flags = {
            device: buffer[FOUND_INF].to(device, copy=True)
            for device in {group.device: None for group in self.groups}
        }
        return GradientSummary(buffer, None, None, self.bounds), flags

    def _order_on(self, device: torch.device) -> torch.Tensor:
        """Return the position of each gradient in the order of the groups."""
        if device not in self._orders:
            if is_capturing(device):
                message = (
                    "Mixed gradient types cannot be set up during CUDA graph capture. "
                    "Run one step before capturing."
                )
                raise ContextError(message)
            order = [index for group in self.groups for index in group.indices]
            positions = torch.tensor(order, device="cpu").argsort()
            self._orders[device] = positions.to(device)
        return self._orders[device]

    # -- changing ----------------------------------------------------------------------

    def multiply_(
        self, grads: list[torch.Tensor], factor: float | torch.Tensor
    ) -> None:
        """Multiply the gradients by one float32 number, in place."""
        if self._reader is not None and isinstance(factor, float):
            self._reader.multiply_(self._select(self.groups[0], grads), factor)
            return
        for group in self.groups:
            group_grads = self._select(group, grads)
            if isinstance(factor, float):
                eager.multiply_(group_grads, factor)
                continue
            number = factor.to(group.device, non_blocking=True)
            if group.kernels is not None:
                group.kernels.multiply_(group_grads, number, version_of(self.layout))
            else:
                eager.multiply_(group_grads, number)

    def _select(self, group: Group, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the elements of a group's gradients, as dense tensors."""
        group_grads = (
            grads if self.is_single else [grads[index] for index in group.indices]
        )
        return (
            group_grads if group.is_dense else [to_dense(grad) for grad in group_grads]
        )


def make_flag(value: float, device: torch.device) -> torch.Tensor:
    """Return a flag as torch's protocol has it: one float32 number."""
    return torch.full((), value, dtype=torch.float32, device=device)


def any_flag(flags: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return 1.0 if any flag is not 0, else 0.0, exactly, on a device."""
    if not flags:
        return make_flag(0.0, device)
    # A copy to the host is read at once, so it is waited for.
    is_late = device.type != "cpu"
    moved = [
        flag.to(device, torch.float32, non_blocking=is_late).reshape(())
        for flag in flags
    ]
    largest = moved[0] if len(moved) == 1 else torch.stack(moved).amax()
    return (largest != 0).to(torch.float32)


def invert(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale in float32, divided in float64 where the device has it."""
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def to_dense(grad: torch.Tensor) -> torch.Tensor:
    """Return the elements of a gradient as a dense real tensor that shares them."""
    if grad.layout is torch.sparse_coo:
        grad = uncoalesced_values(grad)
    elif grad.layout is not torch.strided:
        grad = grad.values()
    if grad.is_complex():
        # Conjugated or not, the magnitudes are the same, and so is a real factor.
        return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
    return grad


def _measure_eagerly(
    grads: list[torch.Tensor],
    device: torch.device,
    gradient_scale: GradientScale,
    request: InspectionRequest,
    bounds: list[float],
) -> torch.Tensor:
    """Return the buffer of a summary that torch's operations make."""
    if device.type == "cpu":
        scale_and_inverse = gradient_scale.on_host()
        layout = host.HostLayout(grads, bounds)
        numbers, amaxes, _ = host.measure(grads, *scale_and_inverse, request, layout)
        # The summary of all groups needs the magnitude of each tensor.
        values = amaxes or [0.0] * len(grads)
        return torch.tensor(numbers + values, dtype=torch.float32, device="cpu")
    scale, inverse = (
        number.to(device, non_blocking=True)
        for number in gradient_scale.scale_and_inverse()
    )
    return eager.measure_on_device(grads, scale, inverse, request, bounds)


def _is_overlapping(grad: torch.Tensor) -> bool:
    """Whether several elements of a gradient share memory: it was expanded."""
    if grad.layout is not torch.strided:
        return False
    pairs = zip(grad.stride(), grad.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in pairs)


def _is_dense(grad: torch.Tensor) -> bool:
    """Whether a gradient is what `to_dense` returns."""
    return grad.layout is torch.strided and not grad.is_complex()


def _is_plain(grad: object) -> bool:
    """Whether a gradient's elements are where its attributes say."""
    if not isinstance(grad, torch.Tensor):
        return False
    if type(grad) not in (torch.Tensor, torch.nn.Parameter):
        return False
    real = grad.dtype.to_real() if grad.is_complex() else grad.dtype
    return real in LIMITS
