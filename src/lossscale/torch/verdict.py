# SPDX-License-Identifier: Apache-2.0
"""What the gradients of one optimizer were, in one small buffer on their device.

The buffer is float32: ten numbers about all gradients, then one per tensor, its
largest magnitude as it came (infinity or NaN if it is not finite, infinity also if only
unscaling would make it so). The kernels and the eager path write the same layout.
Nothing here waits for a device until a number is asked for; `publish` starts a copy to
the host, which has arrived a step later.
"""

import math
from typing import Any, Literal, NamedTuple

import torch

from lossscale.torch.devices import capturing

FOUND = 0
"""1 if the step must be skipped, else 0; exactly, because optimizers compare with 1."""
NAN = 1
"""1 if a gradient is NaN."""
AMAX = 2
"""The largest magnitude of the tensors that are finite, still scaled."""
NORM = 3
"""The norm, unscaled."""
DIVISOR = 4
"""What divides gradients in the optimizer: the scale over the clip coefficient."""
FACTOR = 5
"""What gradients are multiplied by in place: the clip coefficient over the scale."""
SCALE = 6
"""The scale that the gradients carry."""
CLIP = 7
"""The clip coefficient: 1 where nothing is clipped."""
TOO_LARGE = 8
"""1 if the gradients are finite, and too large for the optimizer to square or add: the
step is skipped, and the scale stays."""
LOSS = 9
"""1 if the loss was not finite before it was scaled, 0 if it was, or NOT_MEASURED.
Written when the scale moves, where the loss is not on the host."""
HEADER = 10

NOT_MEASURED = -1.0
"""Stands for a largest magnitude or a norm that nobody looked for."""


Reason = Literal["inf", "nan", "loss", "headroom", "not stepped"]
"""Why a step was skipped."""


class Seen(NamedTuple):
    """A verdict as Python numbers."""

    finite: bool
    nan: bool
    amax: float | None
    norm: float | None
    scale: float
    clip: float
    too_large: bool
    loss_nonfinite: bool | None


class Verdict:
    """A verdict on the gradients of one optimizer; see the module."""

    def __init__(
        self,
        buffer: Any,
        places: list[int] | None = None,
        bounds: list[float] | None = None,
        *,
        measured: bool = True,
    ) -> None:
        """Keep a verdict.

        Args:
            buffer: The layout above.
            places: Which of the optimizer's parameters the tensors belong to; `None`
                if to each of them.
            bounds: What each tensor may be once unscaled; `None` if not known.
            measured: Whether anybody looked for more than the flag.
        """
        self.buffer = buffer
        # A tensor of its own: torch and its users keep it, add to it and reduce it.
        self.found = buffer[FOUND]
        self.too_large = buffer[TOO_LARGE]
        self._places = places
        self._bounds = bounds
        self.measured = measured
        self._copy: Any = None
        self._event: Any = None

    def is_within(self, max_norm: float) -> bool:
        """Whether gradients that are clipped to a norm are never too large."""
        return self._bounds is not None and max_norm <= min(self._bounds)

    def overflowed(self) -> Any:
        """Return 1.0 if the step is skipped for more than gradients too large."""
        return self.found * (1.0 - self.too_large)

    def add(self, tops: Any, scale: Any, none_good: Any, overflowed: Any) -> None:
        """Merge the measurements of the micro-batches that this is the sum of.

        Args:
            tops: The largest magnitude of each parameter over all of them.
            scale: The scale that they carried.
            none_good: 1.0 if none of them could be used.
            overflowed: 1.0 if one of them was not finite.
        """
        self.buffer[SCALE] = scale
        self.buffer[FOUND] = torch.maximum(self.buffer[FOUND], none_good)
        all_too_large = none_good * (1.0 - overflowed)
        self.buffer[TOO_LARGE] = torch.maximum(self.too_large, all_too_large)
        own = tops if self._places is None else tops[self._places]
        own = own.to(self.buffer.device)
        if not len(own):  # a rank that has no gradient
            return
        self.buffer[AMAX] = torch.where(own.isfinite(), own, 0.0).amax()
        self.buffer[NAN] = torch.maximum(self.buffer[NAN], own.isnan().any().float())
        self.buffer[HEADER:] = torch.maximum(self.buffer[HEADER:], own)

    def tell(self, nan: Any, amax: Any) -> None:
        """Take in what the micro-batches of all ranks were."""
        self.buffer[NAN] = torch.maximum(self.buffer[NAN], nan.to(self.buffer))
        self.buffer[AMAX] = amax.to(self.buffer)

    @property
    def stays(self) -> bool:
        """Whether what is read will not change; a CUDA graph writes its own anew."""
        return self._event is not None or self.buffer.device.type != "cuda"

    def publish(self, shelf: "Shelf") -> None:
        """Start a copy to the host, which nobody waits for.

        In a CUDA graph there is no later; the buffer itself is read when asked.
        """
        device = self.buffer.device
        if device.type != "cuda" or capturing(device):
            return
        self._copy = shelf.room(self.buffer.shape[0])
        self._copy.copy_(self.buffer, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def arrived(self) -> bool:
        """Whether `seen` would not wait, as far as that is known."""
        if self._event is not None:
            # While a graph is captured CUDA lets nobody ask.
            return not capturing(self.buffer.device) and bool(self._event.query())
        return self.stays

    def seen(self) -> Seen:
        """Return the numbers; waits for the device if they have not arrived."""
        numbers = self._arrived()[:HEADER].tolist()
        return Seen(
            finite=numbers[FOUND] == 0.0,
            nan=numbers[NAN] != 0.0,
            amax=_measured(numbers[AMAX]),
            norm=_measured(numbers[NORM]),
            scale=numbers[SCALE],
            clip=numbers[CLIP],
            too_large=numbers[TOO_LARGE] != 0.0,
            loss_nonfinite=(
                None if numbers[LOSS] == NOT_MEASURED else numbers[LOSS] != 0.0
            ),
        )

    def broken(self) -> list[tuple[int, Reason]]:
        """Return which parameters' gradients kept the step from being applied.

        Each with "inf", "nan" or "headroom".
        """
        numbers = self._arrived().tolist()
        tops = numbers[HEADER:]
        reasons: list[Reason | None] = [
            "nan" if math.isnan(top) else "inf" if math.isinf(top) else None
            for top in tops
        ]
        if numbers[TOO_LARGE] and self._bounds is not None:
            scale = numbers[SCALE]
            reasons = [
                "headroom" if top > bound * scale else None
                for top, bound in zip(tops, self._bounds, strict=True)
            ]
        return [
            (place if self._places is None else self._places[place], reason)
            for place, reason in enumerate(reasons)
            if reason is not None
        ]

    def _arrived(self) -> Any:
        """Return the buffer or its copy, which is waited for."""
        if self._event is None:
            return self.buffer
        self._event.synchronize()
        return self._copy


class Shelf:
    """Host memory that a device can write to while the host goes on.

    To allocate such memory takes longer than to copy into it, so there is some in store
    for the next steps. What was given out stays with who has it.
    """

    def __init__(self) -> None:
        self._store: dict[int, list[Any]] = {}

    def room(self, length: int) -> Any:
        """Return room for so many float32 numbers, given out once."""
        store = self._store.get(length)
        if not store:
            block = torch.empty(
                (_STORED, length), dtype=torch.float32, device="cpu", pin_memory=True
            )
            store = self._store[length] = list(block.unbind())
        return store.pop()


_STORED = 32
"""For how many steps there is room in store."""


def _measured(number: float) -> float | None:
    """Return a number, unless it says that nobody looked."""
    return None if number == NOT_MEASURED else number
