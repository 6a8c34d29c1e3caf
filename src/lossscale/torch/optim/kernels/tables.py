# SPDX-License-Identifier: Apache-2.0
"""What the kernels know about the tensors of an optimizer, and their launches.

Parameters and what is kept for them stay where they are, so their addresses are copied
to the device once. The addresses of the gradients are compared at every step, and the
settings of the groups too; both are copied only when they changed. Nothing here waits
for the device.

A launch covers parameters of one kind or two, such as float16 weights with masters and
the float32 weights of normalisation layers. More kinds take more launches.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
import triton.language as tl

from lossscale.torch.devices import device_context, is_capturing
from lossscale.torch.inspection.kernels.launch import KernelLauncher, KernelVariant
from lossscale.torch.optim.kernels import adam, sgd
from lossscale.torch.optim.kernels.addresses import GradientAddresses
from lossscale.torch.optim.kernels.host_copies import make_tensor
from lossscale.torch.optim.kernels.memory import COLUMNS, SCALARS, SUMS
from lossscale.torch.optim.kernels.settings import Settings, host_rate

BLOCK = 1024
"""How many elements a chunk has."""
ROWS = 256
"""How many parameters a program of `prepare_adam` takes."""

DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}

Kind: TypeAlias = tuple[object, ...]
"""The compile-time constants of a parameter's update: dtypes, and what there is."""
Group: TypeAlias = Mapping[str, Any]
"""A parameter group."""


class Row(NamedTuple):
    """A parameter in the tables."""

    param: torch.Tensor
    grad_dtype: torch.dtype
    """The dtype of its gradient."""
    kept: tuple[torch.Tensor | None, ...]
    """What the kernel updates with it, in the order of its columns."""
    group: int
    step: torch.Tensor | None = None


class Unit(NamedTuple):
    """Parameters that one launch covers."""

    kinds: tuple[Kind, Kind]
    chunks: int
    chunk_tensors: torch.Tensor
    variants: dict[tuple[object, ...], KernelVariant]
    """The kernel that updates them, by its constants after the kinds."""

    def find(self, kernel: Any, constants: tuple[object, ...]) -> KernelVariant:
        """Return the kernel with its constants."""
        variant = self.variants.get(constants)
        if variant is None:
            first, second = self.kinds
            kinds = (*first, *second, first != second)
            variant = self.variants[constants] = KernelVariant(
                kernel, (*kinds, *constants)
            )
        return variant


class MeasuredRows(NamedTuple):
    """What the kernels have measured, on their device."""

    sums: torch.Tensor
    """A row for each parameter, as `measure_update` describes it; zeros where there was
    no gradient."""
    skipped: torch.Tensor
    """0.0 if the step was taken."""


class Tables:
    """The tables of one device."""

    def __init__(self, rows: Sequence[Row], groups: int) -> None:
        """Copy to the device what does not change.

        Args:
            rows: The parameters.
            groups: How many parameter groups there are.
        """
        self._count = len(rows)
        self.device = rows[0].param.device
        self._block = BLOCK
        counts = [row.param.numel() for row in rows]
        chunks = [-(-count // BLOCK) for count in counts]
        kinds = [self._kind(row) for row in rows]
        self.units: list[Unit] = []
        starts, numbers = [0] * len(rows), [0] * len(rows)
        distinct = list(dict.fromkeys(kinds))
        for first in range(0, len(distinct), 2):
            pair = distinct[first : first + 2]
            members = [index for index, kind in enumerate(kinds) if kind in pair]
            counts_of_pair = [chunks[index] for index in members]
            for index, start in zip(
                members, accumulate(counts_of_pair, initial=0), strict=False
            ):
                starts[index], numbers[index] = start, pair.index(kinds[index])
            chunk_tensors = torch.repeat_interleave(
                make_tensor(members, torch.int32),
                make_tensor(counts_of_pair, torch.int64),
            )
            self.units.append(
                Unit(
                    (pair[0], pair[-1]),
                    sum(counts_of_pair),
                    chunk_tensors.to(self.device),
                    {},
                )
            )
        addresses = [self._addresses_of(row) for row in rows]
        self._is_aligned = not any(
            address % 16 for columns in addresses for address in columns
        )
        self._pointers = make_tensor(addresses, torch.int64).to(self.device)
        self._counts = make_tensor(counts, torch.int64).to(self.device)
        self._starts = make_tensor(starts, torch.int32).to(self.device)
        self._kinds = make_tensor(numbers, torch.int32).to(self.device)
        self._groups = make_tensor([row.group for row in rows], torch.int32).to(
            self.device
        )
        self._settings = Settings(groups, self.device)
        self._grads = GradientAddresses(len(rows), self.device)
        self._kept: list[GradientAddresses] = []
        """Addresses that CUDA graphs read."""
        self._no_scale = torch.ones((), dtype=torch.float32, device=self.device)
        self._no_flag = torch.zeros((), dtype=torch.float32, device=self.device)
        self._launcher = KernelLauncher()

    def _addresses_of(self, row: Row) -> list[int]:
        """Return a row of addresses; 0 where there is nothing."""
        tensors = (row.param, *row.kept)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return addresses + [0] * (COLUMNS.value - len(addresses))

    def copy_settings(self, groups: Sequence[Group]) -> None:
        """Copy settings of the groups to the device if they changed."""
        self._settings.copy([self._settings_of(group) for group in groups])
        for number, group in enumerate(groups):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
                self._settings.copy_rate(number, rate)

    def apply(
        self,
        grads: list[torch.Tensor | None] | None,
        groups: Sequence[Group],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        *,
        has_all: bool,
        version: int | None = None,
        write_back: bool,
        measure: bool = False,
    ) -> MeasuredRows | None:
        """Update the parameters.

        Args:
            grads: The gradient of each row, `None` where there is none; or `None` if
                they have the addresses of the step before.
            groups: The parameter groups.
            grad_scale: What divides the gradients, if they are scaled.
            found_inf: 1.0 to skip the step, else 0.0.
            has_all: Whether every row has a gradient.
            version: What `version_of` says of the gradients.
            write_back: Whether to write the unscaled gradients.
            measure: Whether to measure what is added to the weights.

        Returns:
            What was measured.
        """
        self.copy_settings(groups)
        addresses = self._grads
        if is_capturing(self.device):
            # A graph gets addresses of its own, which never change.
            addresses = GradientAddresses(self._count, self.device)
            self._kept.append(addresses)
        if grads is not None:
            addresses.set(grads, has_all=has_all, version=version)
        scale = self._number(grad_scale, self._no_scale)
        flag = self._number(found_inf, self._no_flag)
        is_aligned = self._is_aligned and addresses.is_aligned
        sums = None
        if measure:
            sums = torch.zeros(
                (self._count, SUMS.value), dtype=torch.float64, device=self.device
            )
        with device_context(self.device):
            constants = (write_back, is_aligned, self._block, measure)
            self._launch(addresses.table, scale, flag, constants, sums)
        return None if sums is None else MeasuredRows(sums, flag)

    def _number(
        self, number: torch.Tensor | None, default: torch.Tensor
    ) -> torch.Tensor:
        """Return a number on the device, in float32."""
        if number is None:
            return default
        return number.to(self.device, torch.float32, non_blocking=True)

    def _launch_units(
        self,
        kernel: Any,
        grads: torch.Tensor,
        arguments: tuple[torch.Tensor, ...],
        flag: torch.Tensor,
        constants: tuple[object, ...],
        sums: torch.Tensor | None,
    ) -> None:
        """Launch the kernel that updates, once for every two kinds of parameters.

        Args:
            kernel: The kernel.
            grads: The addresses of the gradients.
            arguments: Its arguments after the tables.
            flag: 1.0 to skip the step, else 0.0.
            constants: Its constants after the kinds; the last says whether it measures.
            sums: Where what the chunks have measured is added up, tensor by tensor;
                `None` to measure nothing.
        """
        for unit in self.units:
            if not unit.chunks:
                continue
            tables = (
                self._pointers,
                grads,
                self._counts,
                self._kinds,
                self._starts,
                unit.chunk_tensors,
            )
            if sums is None:
                # The last argument is one that the kernel ignores.
                kernel_arguments = (*tables, *arguments, flag, self._no_flag)
                unit.find(kernel, constants).launch(unit.chunks, kernel_arguments)
                continue
            chunk_sums = sums.new_zeros((unit.chunks, SUMS.value))
            kernel_arguments = (*tables, *arguments, flag, chunk_sums)
            unit.find(kernel, constants).launch(unit.chunks, kernel_arguments)
            sums.index_add_(0, unit.chunk_tensors, chunk_sums)
            plain = (*constants[:-1], False)
            if plain not in unit.variants:
                # The next step may be captured in a graph, when nothing can be
                # compiled. This one is skipped: its flag is 1.
                kernel_arguments = (*tables, *arguments, self._no_scale, self._no_flag)
                unit.find(kernel, plain).launch(unit.chunks, kernel_arguments)

    def _kind(self, row: Row) -> Kind:
        raise NotImplementedError

    def _settings_of(self, group: Group) -> list[float]:
        raise NotImplementedError

    def _launch(
        self,
        grads: torch.Tensor,
        scale: torch.Tensor,
        flag: torch.Tensor,
        constants: tuple[object, ...],
        sums: torch.Tensor | None,
    ) -> None:
        raise NotImplementedError


class AdamTables(Tables):
    """The tables of Adam: both moments, the largest second one, the master."""

    def __init__(
        self, rows: Sequence[Row], groups: int, *, stochastic: bool = False
    ) -> None:
        """Copy to the device what does not change, and put the step counts together.

        Args:
            rows: The parameters.
            groups: How many parameter groups there are.
            stochastic: Whether second moments in bfloat16 are rounded stochastically.
        """
        super().__init__(rows, groups)
        self._stochastic = stochastic
        # One copy for all that are on the host still, as after the first step by torch.
        counts = [row.step for row in rows if row.step is not None]
        on_host = all(count.device.type == "cpu" for count in counts)
        place = "cpu" if on_host else self.device
        stacked = torch.stack([count.to(place, torch.float32) for count in counts])
        self.steps = stacked.to(self.device)
        self._scalars = torch.zeros(
            len(rows) * SCALARS.value, dtype=torch.float32, device=self.device
        )

    def _kind(self, row: Row) -> Kind:
        mean, _, largest, master = row.kept
        moments = row.param.dtype if mean is None else mean.dtype
        return (
            DTYPES[row.param.dtype],
            DTYPES[row.grad_dtype],
            DTYPES[moments],
            master is not None,
            largest is not None,
        )

    def _settings_of(self, group: Group) -> list[float]:
        beta1, beta2 = group["betas"]
        return [
            host_rate(group["lr"]),
            _log(beta1),
            _log(beta2),
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            group["eps"],
            group["weight_decay"],
            float(group["decoupled_weight_decay"]),
            -1.0 if group["maximize"] else 1.0,
        ]

    def _launch(
        self,
        grads: torch.Tensor,
        scale: torch.Tensor,
        flag: torch.Tensor,
        constants: tuple[object, ...],
        sums: torch.Tensor | None,
    ) -> None:
        self._launcher.launch(
            adam.prepare_adam,
            -(-self._count // ROWS),
            (
                self._settings.table,
                self._groups,
                self.steps,
                grads,
                scale,
                flag,
                self._scalars,
                self._count,
            ),
            (ROWS,),
        )
        arguments = (self._scalars,)
        constants = (self._stochastic, *constants)
        self._launch_units(adam.apply_adam, grads, arguments, flag, constants, sums)


class SgdTables(Tables):
    """The tables of SGD: momentum and master."""

    def _kind(self, row: Row) -> Kind:
        buffer, master = row.kept
        # Without momentum nothing is read in this dtype.
        buffer_dtype = torch.float32 if buffer is None else buffer.dtype
        return (
            DTYPES[row.param.dtype],
            DTYPES[row.grad_dtype],
            DTYPES[buffer_dtype],
            master is not None,
            buffer is not None,
        )

    def _settings_of(self, group: Group) -> list[float]:
        return [
            host_rate(group["lr"]),
            group["momentum"],
            1.0 - group["dampening"],
            group["weight_decay"],
            float(group["nesterov"]),
            -1.0 if group["maximize"] else 1.0,
        ]

    def _launch(
        self,
        grads: torch.Tensor,
        scale: torch.Tensor,
        flag: torch.Tensor,
        constants: tuple[object, ...],
        sums: torch.Tensor | None,
    ) -> None:
        arguments = (self._groups, self._settings.table, scale)
        self._launch_units(sgd.apply_sgd, grads, arguments, flag, constants, sums)


def _log(number: float) -> float:
    return math.log(number) if number > 0.0 else -math.inf  # a decay rate may be 0
