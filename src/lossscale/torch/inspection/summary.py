# SPDX-License-Identifier: Apache-2.0
"""`GradientSummary`: what one inspection of one optimizer's gradients found.

Ten numbers about all gradients, then one per tensor: its largest magnitude, still
scaled (NaN or infinity if it is not finite; infinity also if only unscaling would make
it so). On a CPU they are Python floats in a list. On a device they are one float32
buffer, which the kernels and the eager backend write alike, and which is copied to the
host without a wait: `publish` starts the copy, `is_ready` asks for it, `on_host` waits
for it.

`numbers[NORM]` is a float or a tensor of no dimension; both take the same operators.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from lossscale.core.validation import as_float32
from lossscale.torch.devices import current_stream, is_capturing
from lossscale.torch.inspection.buffer_pools import PinnedPool, keep_until

FOUND_INF = 0
"""1 if the step must be skipped, else 0; exactly, because optimizers compare with 1."""
NAN = 1
"""1 if a gradient is NaN."""
AMAX = 2
"""The largest magnitude of the tensors that are finite, still scaled."""
NORM = 3
"""The norm, unscaled."""
GRAD_SCALE = 4
"""What a fused optimizer divides gradients by: the scale over the clip factor."""
FACTOR = 5
"""What gradients are multiplied by in place: the clip factor over the scale."""
SCALE = 6
"""The scale that the gradients carry."""
CLIP = 7
"""The clip factor: 1 where nothing is clipped."""
TOO_LARGE = 8
"""1 if the gradients are finite and too large for the optimizer: the step is skipped,
and the scale stays."""
LOSS = 9
"""1 if the loss was not finite before it was scaled, 0 if it was, or NOT_MEASURED. The
update of the scale writes it, where the loss is on a device."""
HEADER = 10

NOT_MEASURED = -1.0
"""The value of a norm or magnitude that was not measured."""

Numbers = list[float] | torch.Tensor
"""The header and, on a device, the magnitudes of all tensors after it."""

Reason = Literal["inf", "nan", "loss", "headroom", "not stepped"]
"""Why a step was not applied."""


class HostSummary(NamedTuple):
    """A summary as Python values."""

    finite: bool
    nan: bool
    amax: float | None
    norm: float | None
    scale: float
    clip: float
    too_large: bool
    loss_nonfinite: bool | None


@dataclass(eq=False)
class GradientSummary:
    """The measurements of one optimizer's gradients; see the module."""

    numbers: Numbers
    amax_per_tensor: list[float] | None = None
    """On a CPU, if it was measured. On a device it is the end of `numbers`."""
    param_indices: list[int] | None = None
    """Which of the optimizer's parameters the tensors belong to; `None` for all."""
    bounds: list[float] | None = None
    """What each tensor may be once unscaled; `None` if that was not checked."""
    unread: Callable[[], list[float]] | None = None
    """Returns `amax_per_tensor`, if it was left for the first reader."""
    is_measured: bool = True
    """Whether more than the flag was measured."""
    _copy: torch.Tensor | None = None
    _event: torch.cuda.Event | None = None
    _has_arrived: bool = False
    _arrived: list[float] | None = None
    """The copy as Python floats, once it was read."""

    @classmethod
    def of_flag(cls, flag: torch.Tensor, scale: torch.Tensor) -> "GradientSummary":
        """Return a summary that says no more than a flag."""
        if flag.device.type == "cpu":
            value, number = float(flag.item() != 0.0), float(scale.item())
            inverse = 1.0 / number if number else math.inf
            numbers = [value, 0.0, NOT_MEASURED, NOT_MEASURED, number, inverse]
            numbers += [number, 1.0, 0.0, NOT_MEASURED]
            return cls(numbers, is_measured=False)
        unit = torch.ones_like(flag)
        moved_scale = scale.to(flag.device)
        header = [
            (flag != 0).to(unit.dtype),
            0 * unit,
            -unit,
            -unit,
            moved_scale,
            1 / moved_scale,
        ]
        buffer = torch.stack([*header, moved_scale, unit, 0 * unit, -unit])
        return cls(buffer, is_measured=False)

    # -- reading and writing one number ------------------------------------------------

    @property
    def is_on_host(self) -> bool:
        """Whether the numbers are in the host's memory already."""
        return isinstance(self.numbers, list) or self.numbers.device.type == "cpu"

    def slot(self, index: int) -> torch.Tensor:
        """Return one number as a tensor; on a device, a view that can be written to."""
        if isinstance(self.numbers, list):
            number = self.numbers[index]
            return torch.full((), number, dtype=torch.float32, device="cpu")
        return self.numbers[index]

    def header_on(self, device: torch.device) -> torch.Tensor:
        """Return a copy of the numbers about all gradients, on a device."""
        header = self.numbers[:HEADER]
        if isinstance(header, list):
            return torch.tensor(header, dtype=torch.float32, device=device)
        return header.to(device, copy=True)

    def overflowed(self) -> torch.Tensor:
        """Return 1.0 if the step is skipped for more than gradients too large."""
        return self.slot(FOUND_INF) * (1.0 - self.slot(TOO_LARGE))

    def set_found_inf(self, flag: torch.Tensor) -> None:
        """Take over a flag that others may have written to."""
        numbers = self.numbers
        if isinstance(numbers, list):
            numbers[FOUND_INF] = flag.item()
        elif flag.data_ptr() != numbers.data_ptr():  # FOUND_INF is the first
            numbers[FOUND_INF].copy_(flag.reshape(()))

    def set_too_large(self, flag: torch.Tensor) -> None:
        """Set whether the step is skipped only because of gradients too large."""
        if isinstance(self.numbers, list):
            self.numbers[TOO_LARGE] = flag.item()
        else:
            self.numbers[TOO_LARGE].copy_(flag)

    def replace_scale(self, other: "GradientSummary") -> None:
        """Take over the scale of another summary; both are on the host.

        Magnitudes and bounds are then those of gradients that carry it.
        """
        old, new = float(self.numbers[SCALE]), float(other.numbers[SCALE])
        self.numbers[SCALE] = new
        amax = float(self.numbers[AMAX])
        if amax != NOT_MEASURED:
            self.numbers[AMAX] = amax * (new / old)
        if self.bounds is not None:
            # The magnitudes of single tensors stay as they are.
            self.bounds = [bound * (old / new) for bound in self.bounds]

    def to_buffer(self) -> torch.Tensor:
        """Return the numbers as one tensor, which this summary has from now on."""
        if isinstance(self.numbers, list):
            numbers = self.numbers + self._amaxes()
            self.numbers = torch.tensor(numbers, dtype=torch.float32, device="cpu")
            self.amax_per_tensor = None
        return self.numbers

    def amaxes_as_tensor(self) -> torch.Tensor:
        """Return the largest magnitude of each tensor, which was measured."""
        if isinstance(self.numbers, list):
            amaxes = self._amaxes()
            return torch.tensor(amaxes, dtype=torch.float32, device="cpu")
        return self.numbers[HEADER:]

    def is_within_headroom(self, max_norm: float) -> bool:
        """Whether gradients clipped to a norm are never too large for the optimizer."""
        return self.bounds is not None and max_norm <= min(self.bounds)

    @property
    def is_final(self) -> bool:
        """Whether the numbers will not change; a CUDA graph writes its own again."""
        if isinstance(self.numbers, list):
            return True
        return self._event is not None or self.numbers.device.type != "cuda"

    def take_copy(self, pool: PinnedPool) -> torch.Tensor | None:
        """Return pinned memory for a kernel to copy the numbers to, before `publish`.

        Returns:
            `None` where there is nothing to copy. So it is in a CUDA graph: the buffer
            itself is read when asked for.
        """
        numbers = self.numbers
        if isinstance(numbers, list) or numbers.device.type != "cuda":
            return None
        if is_capturing(numbers.device):
            return None
        self._copy = pool.take(numbers.shape[0])
        return self._copy

    def publish(self, pool: PinnedPool) -> None:
        """Start a copy to the host, unless a kernel makes it; note when it arrives."""
        numbers = self.numbers
        if isinstance(numbers, list):
            return
        by_kernel = self._copy is not None
        copy = self._copy if by_kernel else self.take_copy(pool)
        if copy is None:
            return
        if not by_kernel:
            copy.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(current_stream(numbers.device))
        if by_kernel:
            keep_until(self._event, copy)

    def is_ready(self) -> bool:
        """Whether `on_host` would not wait, as far as that is known."""
        if self._event is None or isinstance(self.numbers, list):
            return self.is_final
        if not self._has_arrived and not is_capturing(self.numbers.device):
            # CUDA forbids the question while a graph is being captured.
            self._has_arrived = self._event.query()
        return self._has_arrived

    def skips_step(self) -> bool:
        """Whether the step must be skipped; waits as `on_host` does."""
        numbers = self.numbers
        if isinstance(numbers, list):
            return numbers[FOUND_INF] != 0.0
        return self._header()[FOUND_INF] != 0.0

    def on_host(self) -> HostSummary:
        """Return the numbers; waits for the device if they have not arrived."""
        numbers = self._header()
        loss, norm = numbers[LOSS], numbers[NORM]
        return HostSummary(
            finite=numbers[FOUND_INF] == 0.0,
            nan=numbers[NAN] != 0.0,
            amax=None if numbers[AMAX] == NOT_MEASURED else numbers[AMAX],
            # In float32, as the tensor that clipping returns.
            norm=None if norm == NOT_MEASURED else as_float32(norm),
            scale=numbers[SCALE],
            clip=numbers[CLIP],
            too_large=numbers[TOO_LARGE] != 0.0,
            loss_nonfinite=None if loss == NOT_MEASURED else loss != 0.0,
        )

    def nonfinite(self) -> list[tuple[int, Reason]]:
        """Return which parameters kept the step from being applied, and by what."""
        numbers = self._values()
        magnitudes = self._amaxes() or numbers[HEADER:]
        if numbers[TOO_LARGE] and self.bounds is not None and magnitudes:
            scale = numbers[SCALE]
            pairs = enumerate(zip(magnitudes, self.bounds, strict=True))
            reasons: list[tuple[int, Reason]] = [
                (index, "headroom")
                for index, (magnitude, bound) in pairs
                if magnitude > bound * scale
            ]
        else:
            reasons = [
                (index, "nan" if math.isnan(magnitude) else "inf")
                for index, magnitude in enumerate(magnitudes)
                if not math.isfinite(magnitude)
            ]
        if self.param_indices is None:
            return reasons
        return [(self.param_indices[index], reason) for index, reason in reasons]

    def _amaxes(self) -> list[float]:
        """Return what is known of each tensor's magnitude on a CPU; may be empty."""
        if self.unread is not None:
            self.amax_per_tensor, self.unread = self.unread(), None
        return self.amax_per_tensor or []

    def _header(self) -> list[float]:
        """Return the first numbers, which are about all gradients together."""
        if isinstance(self.numbers, list):
            return self.numbers
        if self._event is None or self._copy is None:
            current: list[float] = self.numbers[:HEADER].tolist()
            return current
        if self._arrived is None:
            self._wait(self._event)
            self._arrived = self._copy[:HEADER].tolist()
        return self._arrived

    def _values(self) -> list[float]:
        """Return all numbers; after the first ones there is one for each gradient."""
        if isinstance(self.numbers, list):
            return self.numbers
        numbers = self.numbers
        if self._event is not None and self._copy is not None:
            self._wait(self._event)
            numbers = self._copy
        values: list[float] = numbers.tolist()
        return values

    def _wait(self, event: torch.cuda.Event) -> None:
        if not self._has_arrived:
            event.synchronize()
            self._has_arrived = True
