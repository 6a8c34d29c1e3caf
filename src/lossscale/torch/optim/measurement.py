# SPDX-License-Identifier: Apache-2.0
"""`UpdateMeasurement`: what one step of an optimizer adds to the weights.

The kernels measure while they update. For what torch's functions update, the update is
computed once more by the optimizer's formula before the step, from the same gradients
and state, and the parameters are compared after it. Only steps that were asked for do
any of this; their numbers reach the host by an asynchronous copy.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lossscale.core.statistics import UpdateStatistics
from lossscale.torch.devices import send_to_host
from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.optim.eager import HostScale, unscale
from lossscale.torch.optim.masters import MASTER

if TYPE_CHECKING:
    from lossscale.torch.optim.optimizer import ScaledOptimizer


class MeasuredWeight(NamedTuple):
    """A weight whose update was measured."""

    position: int
    """Which of the optimizer's parameters it is."""
    size: int
    """How many numbers it has; of a DTensor, the shard of this rank."""
    dtype: str
    has_master: bool


class _Part(NamedTuple):
    """The numbers of some weights, in the host's memory or on their way there."""

    weights: list[MeasuredWeight | None]
    """`None` for a row of a parameter that had no gradient."""
    numbers: torch.Tensor
    """A row for each weight (the update's sum of squares, the weight's, how many
    numbers were lost), then one number that is 0.0 if the step was taken."""
    arrived: torch.cuda.Event | None
    """`None` if they are there."""


class UpdateMeasurement:
    """What was measured in one step; read when it has arrived."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(
        self,
        weights: list[MeasuredWeight | None],
        sums: torch.Tensor,
        skipped: torch.Tensor | None = None,
    ) -> None:
        """Take what was measured on one device; waits for nothing.

        Args:
            weights: The weights; `None` where there was no gradient.
            sums: A row of numbers for each, as `_Part` describes them.
            skipped: 0.0 if the step was taken; `None` if that is known.
        """
        flag = sums.new_zeros(1) if skipped is None else skipped.reshape(1).to(sums)
        numbers, arrived = send_to_host(torch.cat([sums.reshape(-1), flag]))
        self._parts.append(_Part(weights, numbers, arrived))

    @property
    def positions(self) -> list[int]:
        """Which of the optimizer's parameters were measured."""
        found = (weight for part in self._parts for weight in part.weights)
        return sorted(weight.position for weight in found if weight is not None)

    def is_ready(self) -> bool:
        """Whether `read` would not wait for the device."""
        return all(part.arrived is None or part.arrived.query() for part in self._parts)

    def read(self, name_of: Callable[[int], str]) -> UpdateStatistics | None:
        """Return the statistics; waits for the device if they have not arrived.

        Args:
            name_of: Returns the name of a parameter of the optimizer.

        Returns:
            `None` if nothing was updated: the step was skipped.
        """
        rows: list[tuple[MeasuredWeight, float, float]] = []
        for part in self._parts:
            if part.arrived is not None:
                part.arrived.synchronize()
            *numbers, skipped = part.numbers.tolist()
            if skipped != 0.0:
                continue
            columns = numbers[::3], numbers[1::3], numbers[2::3]
            for weight, update, start, lost in zip(part.weights, *columns, strict=True):
                if weight is not None:
                    fraction = lost / max(1, weight.size)
                    rows.append((weight, _ratio_of(update, start), fraction))
        if not rows:
            return None
        rows.sort()
        weights, ratios, fractions = zip(*rows, strict=True)
        return UpdateStatistics(
            [name_of(weight.position) for weight in weights],
            list(ratios),
            list(fractions),
            [weight.dtype for weight in weights],
            [weight.has_master for weight in weights],
        )


def _ratio_of(update: float, weight: float) -> float:
    """Return the quotient of two norms, from their squares."""
    if update == 0.0:
        return 0.0
    return math.sqrt(update) / math.sqrt(weight) if weight != 0.0 else math.inf


def describe_weight(
    optimizer: "ScaledOptimizer", param: torch.Tensor, position: int
) -> MeasuredWeight:
    """Return what is known of a weight before its update is measured."""
    own = real_view(param)
    dtype = str(own.dtype).removeprefix("torch.")
    has_master = optimizer.has_master(param)
    return MeasuredWeight(position, own.numel(), dtype, has_master)


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor: its local shard, and complex ones as pairs."""
    own = local_shard(tensor)
    return torch.view_as_real(own) if own.is_complex() else own


class _Weight(NamedTuple):
    """A weight that torch's functions are about to update."""

    described: MeasuredWeight
    param: torch.Tensor
    before: torch.Tensor
    """The parameter before the step, and NaN where its update is zero."""
    squares: list[torch.Tensor]
    """The sums of squares of update and weight."""


class EagerUpdate:
    """The update that torch's functions are about to make of a group's parameters."""

    def __init__(
        self,
        optimizer: "ScaledOptimizer",
        group: Mapping[str, Any],
        scale: HostScale,
        positions: Mapping[int, int],
    ) -> None:
        """Compute the updates; nothing is changed.

        Args:
            optimizer: The optimizer.
            group: Parameters that have gradients, and their settings.
            scale: What the gradients are multiplied by.
            positions: Which of the optimizer's parameters each is, by its id.
        """
        self._weights = [
            _compute(optimizer, param, group, scale, positions[id(param)])
            for param in group["params"]
            if type(local_shard(param)) in _PLAIN
        ]

    def finish(self, measurement: UpdateMeasurement) -> None:
        """Compare the parameters after the step, and add what was measured."""
        rows: dict[torch.device, list[torch.Tensor]] = {}
        weights: dict[torch.device, list[MeasuredWeight | None]] = {}
        for weight in self._weights:
            # NaN is equal to nothing.
            lost = (weight.before == weight.param).sum().double()
            device = weight.param.device
            rows.setdefault(device, []).append(torch.stack([*weight.squares, lost]))
            weights.setdefault(device, []).append(weight.described)
        for device, own in rows.items():
            measurement.add(weights[device], torch.stack(own))


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Other subclasses of tensors are not measured."""


def _compute(
    optimizer: "ScaledOptimizer",
    param: torch.Tensor,
    group: Mapping[str, Any],
    scale: HostScale,
    position: int,
) -> _Weight:
    """Compute the update of one weight in float32, or in float64 if it has that."""
    own = real_view(param.detach())
    dtype = torch.float64 if own.dtype == torch.float64 else torch.float32
    kept = {
        name: real_view(value).to(dtype)
        for name, value in optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == param.shape
    }
    count = optimizer.state.get(param, {}).get("step", 0.0)
    weight = kept.get(MASTER, own).to(dtype)
    assert param.grad is not None  # noqa: S101  # for mypy
    grad = local_shard(param.grad)
    grad = real_view(grad if grad.layout == torch.strided else grad.to_dense())
    grad = unscale(grad, scale.inverse, dtype)
    update = optimizer.compute_update(weight, grad, kept, float(count), group)
    before = torch.where(update != 0, own, torch.nan)
    squares = [_square(update), _square(weight)]
    described = describe_weight(optimizer, param, position)
    return _Weight(described, own, before, squares)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares in float64."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()
