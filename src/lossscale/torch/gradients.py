# SPDX-License-Identifier: Apache-2.0
"""The gradients of an optimizer: found, sorted by what can read them, looked at.

`Sorted` is worked out when the layout of the gradients changes and kept while it stays.
Groups of one device go through the Triton kernels or, where those do not reach
(sparse, complex, strided with gaps, another device), through torch's own operations;
the verdicts of several groups are made one. Of a DTensor the part on this rank is
looked at; other tensor subclasses are left to torch.
"""

from collections import defaultdict
from typing import Any, NamedTuple
from weakref import ref

import torch

from lossscale.errors import ContextError
from lossscale.torch import eager, fast
from lossscale.torch.devices import capturing
from lossscale.torch.eager import LIMITS, Request
from lossscale.torch.layouts import Layout
from lossscale.torch.sharding import dtensor_class, local
from lossscale.torch.verdict import FACTOR, FOUND, HEADER


def collected(optimizer: Any) -> list[Any]:
    """Return the gradients that there are, in the order of the parameters.

    Of a DTensor it is the part that is on this rank.
    """
    gradients = [
        gradient
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (gradient := parameter.grad) is not None
    ]
    kind = dtensor_class()
    if kind is None or not any(issubclass(k, kind) for k in set(map(type, gradients))):
        return gradients
    return list(map(local, gradients))


def parameters(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class FirstGradient:
    """Which gradient an optimizer had first, to tell it from a later one.

    A backward pass after `zero_grad()` brings a new tensor; after
    `zero_grad(set_to_none=False)` it writes to the same one.
    """

    def __init__(self, optimizer: Any) -> None:
        gradient = _first_gradient(optimizer)
        self._reference = (lambda: None) if gradient is None else ref(gradient)
        self._version = None if gradient is None else gradient._version

    def is_replaced(self, optimizer: Any) -> bool:
        """Whether the optimizer has another tensor now, or none."""
        return self._reference() is not _first_gradient(optimizer)

    def is_succeeded(self, optimizer: Any) -> bool:
        """Whether the optimizer has another tensor now."""
        gradient = _first_gradient(optimizer)
        return gradient is not None and self._reference() is not gradient

    def is_rewritten(self, optimizer: Any) -> bool:
        """Whether the optimizer has the same tensor with other numbers."""
        gradient = _first_gradient(optimizer)
        return gradient is not None and gradient._version != self._version


def _first_gradient(optimizer: Any) -> Any:
    """Return the first gradient that an optimizer has; `None` if it has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                return gradient
    return None


class Group(NamedTuple):
    """Gradients that are read together."""

    device: Any
    places: list[int]
    """Which of the gradients they are."""
    launcher: Any
    """The kernels' side of them; `None` where torch's operations read them."""
    is_dense: bool
    """Whether they are tensors of real numbers, each in its place."""
    share: tuple[int, ...]
    """Over which groups of ranks they are spread; see `ranks.py`."""


class Sorted:
    """The gradients of an optimizer, sorted into groups."""

    def __init__(
        self,
        gradients: list[Any],
        captured: list[Any],
        shares: list[tuple[int, ...]] | None = None,
    ) -> None:
        """Sort gradients.

        Args:
            gradients: As `collected` returns them.
            captured: Where to keep what a CUDA graph will read.
            shares: Over which groups of ranks each of them is spread, if over any.
        """
        self._layout = Layout(gradients)
        self._shares = shares
        self.overlapping = any(map(_overlaps, gradients))
        self.foreign = any(not _is_plain(gradient) for gradient in gradients)
        self.half = [at for at, g in enumerate(gradients) if g.dtype is torch.float16]
        self.sparse = [
            at for at, g in enumerate(gradients) if g.layout is torch.sparse_coo
        ]
        self.groups: list[Group] = []
        self._orders: dict[Any, Any] = {}
        self.bounds: list[float] = []
        self.kept: int | None = None
        """How many parameters had a state when the bounds were set."""
        if self.foreign:
            return
        self.bounds = [LIMITS[dense(gradient).dtype] for gradient in gradients]
        places: dict[Any, list[int]] = defaultdict(list)
        for at, gradient in enumerate(gradients):
            reached = fast.reaches(gradient)
            share = () if shares is None else shares[at]
            places[gradient.device, reached, share].append(at)
        for (device, reached, share), own in places.items():
            bounds = [self.bounds[at] for at in own]
            launcher = fast.launcher(captured, bounds) if reached else None
            is_dense = all(_is_dense(gradients[at]) for at in own)
            self.groups.append(Group(device, own, launcher, is_dense, share))
        self._whole = len(self.groups) == 1

    def fits(
        self, gradients: list[Any], shares: list[tuple[int, ...]] | None = None
    ) -> bool:
        """Whether gradients are still laid out and spread so."""
        return self._shares == shares and self._layout.fits(gradients)

    def set_bounds(self, bounds: list[float]) -> None:
        """Set what each gradient may be once unscaled; see `headroom.py`."""
        if bounds == self.bounds:
            return
        self.bounds = bounds
        for group in self.groups:
            if group.launcher is not None:
                group.launcher.set_bounds([bounds[at] for at in group.places])

    def measure(
        self, gradients: list[Any], scale: Any, inverse: Any, request: Request
    ) -> tuple[Any, dict[Any, Any]]:
        """Return the buffer of the verdict on all, and the flag of each device.

        Args:
            gradients: Such as these were made for, at the places where they are now.
            scale: The scale that they carry; `None` if only the inverse is known.
            inverse: The inverse; `None` to take it of the scale.
            request: What is wanted.
        """
        device = (inverse if scale is None else scale).device
        buffers = self.parts(gradients, scale, inverse, request)
        return self.together(buffers, device, request)

    def parts(
        self, gradients: list[Any], scale: Any, inverse: Any, request: Request
    ) -> list[Any]:
        """Return the buffer of the verdict on each group.

        Where there are several, nothing is clipped yet: that takes the norm of all.
        """
        known = inverse if scale is None else scale
        part = request
        if not self._whole:
            part = request.without_clipping()
            part = part._replace(with_norm=request.wants_norm, with_amax=True)
        buffers = []
        for group in self.groups:
            own = self._own(group, gradients)
            if group.launcher is not None:
                there = known.to(group.device, non_blocking=True)
                buffer = group.launcher.measure(
                    own, there, part, inverted=scale is None
                )
            else:
                bounds = [self.bounds[at] for at in group.places]
                buffer = _eagerly(own, group.device, scale, inverse, part, bounds)
            buffers.append(buffer)
        return buffers

    def together(
        self, buffers: list[Any], device: Any, request: Request
    ) -> tuple[Any, dict[Any, Any]]:
        """Return what the verdicts on all groups come to, and each device's flag."""
        if self._whole:
            return buffers[0], {self.groups[0].device: buffers[0][FOUND]}
        return self.in_order(eager.combine(buffers, device, request))

    def in_order(self, buffer: Any) -> tuple[Any, dict[Any, Any]]:
        """Return a buffer with its tensors in their own order, and the flags.

        In what `combine` returns they stand in the order of their groups.
        """
        if not self._whole:
            back = self._back(buffer.device)
            buffer = torch.cat([buffer[:HEADER], buffer[HEADER:][back]])
        # Each device has a flag of its own, which others may write to.
        flags = {
            device: buffer[FOUND].to(device, copy=True)
            for device in {group.device: None for group in self.groups}
        }
        return buffer, flags

    def _back(self, device: Any) -> Any:
        """Return where each gradient is in the order of the groups."""
        if device not in self._orders:
            if capturing(device):
                message = (
                    "These gradients are of several kinds, and the first step with "
                    "them is being captured in a CUDA graph. Take a step before that."
                )
                raise ContextError(message)
            order = [at for group in self.groups for at in group.places]
            self._orders[device] = (
                torch.tensor(order, device="cpu").argsort().to(device)
            )
        return self._orders[device]

    def multiply_(self, gradients: list[Any], buffer: Any) -> None:
        """Multiply the gradients by the factor of a verdict, in place."""
        for group in self.groups:
            own = self._own(group, gradients)
            factor = buffer[FACTOR].to(group.device, non_blocking=True)
            if group.launcher is not None:
                group.launcher.multiply_(own, factor)
            else:
                eager.multiply_(own, factor)

    def _own(self, group: Group, gradients: list[Any]) -> list[Any]:
        """Return the numbers of the gradients of a group."""
        own = gradients if self._whole else [gradients[at] for at in group.places]
        return own if group.is_dense else [dense(gradient) for gradient in own]


def _overlaps(gradient: Any) -> bool:
    """Whether several numbers of a gradient are one in memory: it was expanded."""
    if gradient.layout is not torch.strided:
        return False
    pairs = zip(gradient.stride(), gradient.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in pairs)


def dense(gradient: Any) -> Any:
    """Return the numbers of a gradient as a dense real tensor that shares them."""
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    if gradient.is_complex():
        # Conjugated or not, the magnitudes are the same, and so is a real factor.
        return torch.view_as_real(gradient.conj() if gradient.is_conj() else gradient)
    return gradient


def _is_dense(gradient: Any) -> bool:
    """Whether a gradient is what `dense` returns."""
    return gradient.layout is torch.strided and not gradient.is_complex()


def inverse_of(scale: Any) -> Any:
    """Return 1 / scale in float32, divided in float64 where the device has it."""
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def _eagerly(
    own: list[Any],
    device: Any,
    scale: Any,
    inverse: Any,
    part: Request,
    bounds: list[float],
) -> Any:
    """Return the verdict that torch's operations come to."""
    if inverse is None:
        inverse = inverse_of(scale)
    if scale is None:
        scale = inverse_of(inverse)
    there = [number.to(device, non_blocking=True) for number in (scale, inverse)]
    return eager.measure(own, *there, part, bounds)


def _is_plain(gradient: Any) -> bool:
    """Whether the numbers of a gradient are where its attributes say."""
    if not isinstance(gradient, torch.Tensor):
        return False
    if type(gradient) not in (torch.Tensor, torch.nn.Parameter):
        return False
    real = gradient.dtype.to_real() if gradient.is_complex() else gradient.dtype
    return real in LIMITS
