# SPDX-License-Identifier: Apache-2.0
"""Statistics of every tensor, on the steps for which the `on_step` callback wants them.

They describe the gradients as stored: scaled, in their own format. A CPU counts with
torch's operations. On a GPU one more kernel reads the gradients, and the counts reach
the host by an asynchronous copy. On all other steps there is no operation at all.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from lossscale.core.statistics import TensorStatistics, UpdateStatistics
from lossscale.torch.devices import is_capturing, send_to_host
from lossscale.torch.inspection.groups import Group, to_dense
from lossscale.torch.inspection.inspector import Collected
from lossscale.torch.parameters import params_of


class ExponentRange(NamedTuple):
    """The exponents that the numbers of a format can have."""

    first: int
    """That of the smallest subnormal number."""
    size: int
    """How many there are."""


_HALF = ExponentRange(-24, 40)
_SINGLE = ExponentRange(-149, 277)
_DOUBLE = ExponentRange(-1074, 2098)


def _range_of(dtype: torch.dtype) -> ExponentRange:
    """Return the range of a dtype; what is not listed is counted as float32."""
    return {torch.float16: _HALF, torch.float64: _DOUBLE}.get(dtype, _SINGLE)


class _Rows(NamedTuple):
    """The counts of some tensors, in the host's memory or on their way there."""

    counts: torch.Tensor
    """A row per tensor: a count per exponent, zeros, not finite, bits of the amax."""
    range: ExponentRange
    positions: list[int]
    """Where these tensors are among all."""
    arrived: torch.cuda.Event | None
    """`None` if they are there."""


class Update(Protocol):
    """What a step has added to the weights of an optimizer."""

    def is_ready(self) -> bool:
        """Whether `read` would not wait for the device."""

    def read(self, name_of: Callable[[int], str]) -> UpdateStatistics | None:
        """Return the statistics; `None` if the step was skipped."""


class SampledTensors:
    """What was counted in one step; read when it has arrived."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._normal: list[int] = []
        """The smallest exponent of a normal number, for each tensor."""
        self._rows: list[_Rows] = []
        self._updates: list[tuple[Update, Callable[[int], str]]] = []
        """With each, the names of its optimizer's parameters."""
        self._read: TensorStatistics | None = None

    def add_update(self, update: Update, name_of: Callable[[int], str]) -> None:
        """Take what the step has added to the weights of an optimizer.

        Args:
            update: What was measured.
            name_of: Returns the name of a parameter of the optimizer.
        """
        self._updates.append((update, name_of))

    @torch.no_grad()
    def add(
        self, grads: list[torch.Tensor], groups: list[Group], names: list[str]
    ) -> None:
        """Count the gradients of an optimizer; waits for nothing.

        Args:
            grads: The gradients.
            groups: Which of them are on one device, and whether kernels can read them.
            names: Their names.
        """
        start = len(self._names)
        dense = [to_dense(grad) for grad in grads]
        self._names += names
        self._sizes += [grad.numel() for grad in dense]
        self._normal += [_smallest_normal(grad.dtype) for grad in dense]
        for group in groups:
            for found in {_range_of(dense[index].dtype) for index in group.indices}:
                own = [i for i in group.indices if _range_of(dense[i].dtype) == found]
                tensors = [dense[index] for index in own]
                has_kernel = group.kernels is not None and found is not _DOUBLE
                count = _count_by_kernel if has_kernel else _count_eagerly
                counts, arrived = send_to_host(count(tensors, found))
                positions = [start + index for index in own]
                self._rows.append(_Rows(counts, found, positions, arrived))

    def is_ready(self) -> bool:
        """Whether `read` would not wait for the device."""
        has_arrived = all(
            part.arrived is None or part.arrived.query() for part in self._rows
        )
        return has_arrived and all(update.is_ready() for update, _ in self._updates)

    def read(self) -> TensorStatistics:
        """Return the statistics; waits for the device if they have not arrived."""
        if self._read is None:
            self._read = self._make()
        return self._read

    def _make(self) -> TensorStatistics:
        for part in self._rows:
            if part.arrived is not None:
                part.arrived.synchronize()
        tensors = len(self._names)
        amax, zeros, subnormals = ([0.0] * tensors for _ in range(3))
        for part in self._rows:
            size = [max(1, self._sizes[position]) for position in part.positions]
            normal = [self._normal[position] for position in part.positions]
            columns = (
                _largest(part),
                part.counts[:, part.range.size].tolist(),
                _count_below(part, normal),
            )
            for position, n, *found in zip(part.positions, size, *columns, strict=True):
                amax[position] = found[0]
                zeros[position], subnormals[position] = found[1] / n, found[2] / n
        first, counts = self._align()
        updates = _join([update.read(name_of) for update, name_of in self._updates])
        return TensorStatistics(
            self._names, self._sizes, amax, zeros, subnormals, first, counts, updates
        )

    def _align(self) -> tuple[int, list[list[int]]]:
        """Return every histogram over the one range of exponents that occurs."""
        ranges = [_occurring(part) for part in self._rows]
        found = [one for one in ranges if one is not None]
        first = min((one[0] for one in found), default=0)
        end = max((one[1] for one in found), default=0)
        counts = [[0] * (end - first) for _ in self._names]
        for part, occurring in zip(self._rows, ranges, strict=True):
            if occurring is None:
                continue
            start, stop = (exponent - part.range.first for exponent in occurring)
            before, after = occurring[0] - first, end - occurring[1]
            listed = part.counts[:, start:stop].tolist()
            for position, row in zip(part.positions, listed, strict=True):
                counts[position] = [0] * before + row + [0] * after
        return first, counts


def _join(updates: list[UpdateStatistics | None]) -> UpdateStatistics | None:
    """Return the updates of several optimizers as one; `None` if all were skipped."""
    taken = [update for update in updates if update is not None]
    if not taken:
        return None
    columns = zip(*taken, strict=True)
    return UpdateStatistics(*(list(chain.from_iterable(own)) for own in columns))


class StatisticsSampler:
    """Samples the gradients of the steps that a callback wants."""

    def __init__(self, on_step: object) -> None:
        """Find out whether the callback ever asks; see `listen`."""
        self.listen(on_step, 1)
        self._iteration: object = None
        self._sampled: SampledTensors | None = None
        self._optimizers: set[int] = set()
        """The ids of those that were sampled in the iteration."""

    def listen(self, on_step: object, index: int) -> None:
        """Find out whether a callback ever asks.

        Args:
            on_step: Asked by its `wants_statistics`, if it has that, with the index of
                the next report.
            index: The index of the report that comes next.
        """
        wants = getattr(on_step, "wants_statistics", None)
        self._wants: Callable[[int], bool] | None = wants if callable(wants) else None
        self.is_listening = self._wants is not None
        """Whether the callback ever asks. If not, there is nothing to call here."""
        self._index = index
        """The index of the report that comes next."""

    def is_due(self) -> bool:
        """Whether the gradients of the current step are wanted."""
        return self._wants is not None and bool(self._wants(self._index))

    def sample(
        self,
        iteration: object,
        optimizer: torch.optim.Optimizer,
        collected: Collected,
        name_of: Callable[[torch.optim.Optimizer, int], str],
    ) -> None:
        """Count gradients that still carry the scale; the first call of a step counts.

        Args:
            iteration: The iteration; one that was discarded takes its sample with it.
            optimizer: Whose gradients they are.
            collected: The gradients.
            name_of: Returns the name of a parameter.
        """
        if self._iteration is not iteration:
            self._iteration, self._sampled, self._optimizers = iteration, None, set()
        grads, groups, _ = collected
        if groups is None or groups.is_foreign or id(optimizer) in self._optimizers:
            return
        if any(is_capturing(group.device) for group in groups.groups):
            return  # a graph would count the same memory at every replay
        self._optimizers.add(id(optimizer))
        names = [
            name_of(optimizer, index)
            for index, param in enumerate(params_of(optimizer))
            if param.grad is not None
        ]
        self._sampled = self._sampled or SampledTensors()
        self._sampled.add(grads, groups.groups, names)

    def add_update(
        self, iteration: object, update: Update, name_of: Callable[[int], str]
    ) -> None:
        """Add what a step has added to the weights, if its gradients were sampled.

        Args:
            iteration: The iteration.
            update: What was measured.
            name_of: Returns the name of a parameter of the optimizer.
        """
        if self._sampled is not None and self._iteration is iteration:
            self._sampled.add_update(update, name_of)

    def take(self, iteration: object) -> SampledTensors | None:
        """End a step: return what was sampled in its iteration; `None` if nothing."""
        sampled = self._sampled if self._iteration is iteration else None
        self._iteration = self._sampled = None
        self._index += 1
        return sampled


def _count_by_kernel(
    tensors: list[torch.Tensor], exponents: ExponentRange
) -> torch.Tensor:
    # Importing Triton after TensorFlow aborts the process.
    from lossscale.torch.inspection.kernels import statistics  # noqa: PLC0415

    return statistics.count_exponents(tensors, *exponents)


def _count_eagerly(
    tensors: list[torch.Tensor], exponents: ExponentRange
) -> torch.Tensor:
    """Return the rows of tensors, by torch's operations on any device."""
    wide = torch.float64 if exponents is _DOUBLE else torch.float32
    return torch.stack([_count_tensor(one.to(wide), exponents) for one in tensors])


_PIECE = 2**22
"""How many elements are counted at a time: their codes take eight bytes each."""


def _count_tensor(tensor: torch.Tensor, exponents: ExponentRange) -> torch.Tensor:
    """Return the row of one float32 or float64 tensor."""
    row, *others = (
        _count_piece(piece, exponents) for piece in tensor.reshape(-1).split(_PIECE)
    )
    for other in others:
        row[:-1] += other[:-1]
        # The bits of magnitudes sort as they do.
        row[-1:] = torch.maximum(row[-1:], other[-1:])
    return row


def _count_piece(tensor: torch.Tensor, exponents: ExponentRange) -> torch.Tensor:
    """Return the row of a tensor of one dimension."""
    first, count = exponents
    values = tensor.abs()
    finite = torch.isfinite(values)
    # The mantissa is in [0.5, 1): its exponent is one above that of the number.
    codes = torch.frexp(values).exponent.long() - (1 + first)
    codes = torch.where(values == 0, count, codes)
    codes = torch.where(finite, codes, count + 1)
    largest = values.new_zeros(1)
    if values.numel():
        largest = torch.where(finite, values, 0.0).amax(0, keepdim=True)
    bits = largest.view(torch.int64 if values.dtype == torch.float64 else torch.int32)
    if values.device.type == "cpu":
        counts = torch.bincount(codes, minlength=count + 2)
    else:  # bincount waits for the device
        counts = torch.zeros(count + 2, dtype=torch.int64, device=values.device)
        counts.scatter_add_(0, codes, torch.ones_like(codes))
    return torch.cat([counts, bits.long()])


def _smallest_normal(dtype: torch.dtype) -> int:
    """Return the exponent of the smallest normal number of a dtype."""
    return math.frexp(torch.finfo(dtype).smallest_normal)[1] - 1


def _largest(part: _Rows) -> list[float]:
    """Return the largest finite magnitude of each tensor."""
    bits = part.counts[:, -1].contiguous()
    if part.range is _DOUBLE:
        found = bits.view(torch.float64)
    else:
        found = bits.to(torch.int32).view(torch.float32)
    listed: list[float] = found.tolist()
    return listed


def _count_below(part: _Rows, exponents: list[int]) -> list[int]:
    """Return how many numbers of each tensor have an exponent below another."""
    totals = part.counts[:, : part.range.size].cumsum(1)
    last = torch.tensor(exponents, dtype=torch.int64, device="cpu")
    last = last - (part.range.first + 1)
    listed: list[int] = totals.gather(1, last[:, None])[:, 0].tolist()
    return listed


def _occurring(part: _Rows) -> tuple[int, int] | None:
    """Return the first exponent that occurs, and one past the last."""
    found = part.counts[:, : part.range.size].any(0).nonzero()[:, 0].tolist()
    if not found:
        return None
    return part.range.first + found[0], part.range.first + found[-1] + 1
