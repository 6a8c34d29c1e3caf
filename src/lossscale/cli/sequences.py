# SPDX-License-Identifier: Apache-2.0
"""The steps that `lossscale simulate` runs over, and the limits of its results."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lossscale.cli.output import number
from lossscale.core.headroom import LARGEST
from lossscale.core.policies import Dynamic
from lossscale.errors import StateError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lossscale.diagnostics import Recording, Simulation


@dataclass(frozen=True)
class StepSequence:
    """The steps of a simulation, and what is known about them."""

    finite: "npt.NDArray[np.bool_]"
    rate: float | None = None
    """The fraction of overflows, if they are random."""
    magnitudes: "npt.NDArray[np.float64] | None" = None
    dtype: str = "float16"
    remarks: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """How many steps there are, and which of them overflow."""
        size = f"{self.finite.size:,} steps"
        if self.magnitudes is None:
            bad = self.finite.size - int(self.finite.sum())
            return f"{size}, {bad:,} of them not finite"
        largest = number(LARGEST[self.dtype])
        return f"{size}, not finite where magnitude times scale is above {largest}"


def make_sequence(
    digits: str | None,
    file: Path | None,
    dtype: str,
    steps: int,
    rate: float,
    seed: int,
) -> StepSequence:
    """Return the steps that the options describe."""
    import numpy as np

    if digits is not None:
        if not digits or set(digits) - set("01"):
            message = (
                f"--finite takes a row of 0 and 1 such as 1110111, got {digits!r}."
            )
            raise click.UsageError(message)
        flags = np.array([digit == "1" for digit in digits])
        return StepSequence(flags)
    if file is not None:
        return _from_file(file, dtype)
    if rate != rate:  # noqa: PLR0124  # NaN passes every range
        message = "--rate must be a number from 0 to 1, got nan."
        raise click.UsageError(message)
    return StepSequence(random_flags(steps, rate, seed), rate)


def random_flags(
    steps: int, rate: float, seed: int, *, piece: int = 2**20
) -> "npt.NDArray[np.bool_]":
    """Return random flags, drawn in pieces: ^C ends it, and memory is a byte a step."""
    import numpy as np

    generator = np.random.default_rng(seed)
    flags = np.empty(steps, np.bool_)
    for start in range(0, steps, piece):
        part = flags[start : start + piece]
        part[:] = generator.random(part.size) >= rate
    return flags


def _from_file(file: Path, dtype: str) -> StepSequence:
    """Return the steps of a recorded run, and the limits of what they show."""
    from lossscale.diagnostics import read_recording

    try:
        if str(file) == "-":
            recording = read_recording(sys.stdin or (), "The standard input")
        else:
            with file.open(encoding="utf-8") as lines:
                recording = read_recording(lines, str(file))
    except UnicodeDecodeError:
        message = f"{file} does not hold steps: it is no text in UTF-8."
        raise StateError(message) from None
    has_magnitudes = recording.replayed < recording.finite.size
    return StepSequence(
        recording.finite,
        magnitudes=recording.magnitudes(dtype) if has_magnitudes else None,
        dtype=dtype,
        remarks=tuple(_list_limits(recording)),
    )


def _list_limits(recording: "Recording") -> Iterable[str]:
    """Yield the limits of the result that a recorded run gives."""
    size = recording.finite.size
    if recording.replayed == size:
        yield (
            "The file holds no magnitudes, so its overflows are repeated whatever the "
            "scale. The result is what each policy does with these overflows, not "
            "where its scale would be in training. For that, record every step as "
            '{"finite": true, "magnitude": 3.1e-05, "scale": 65536}.'
        )
        return
    if recording.replayed:
        yield (
            f"{recording.replayed:,} of {size:,} steps hold nothing but whether they "
            "were finite, and are repeated whatever the scale."
        )
    if recording.bounded:
        plural = "" if recording.bounded == 1 else "s"
        yield (
            f"{recording.bounded:,} overflow{plural} with a scale: taken to overflow "
            "at that scale and above, and to be finite below."
        )


def explain_bounds(
    results: "dict[str, Simulation]", sequence: StepSequence
) -> Iterable[str]:
    """Yield why scales ran to a bound, where overflows do not depend on the scale."""
    if sequence.magnitudes is not None:
        return
    low, high = [], []
    for name, result in results.items():
        policy = result.policy
        if isinstance(policy, Dynamic) and result.backoffs > result.growths:
            low += [name] if result.scales.min() <= policy.min_scale else []
        elif isinstance(policy, Dynamic):
            high += [name] if result.scales.max() >= policy.max_scale else []
    if low:
        yield (
            f"{_join_names(low)} reached its lowest scale, by more back-offs than "
            "growths. In training overflows end once the scale is low enough; here "
            f"{_overflows(sequence, 'lower')}"
        )
    if high:
        yield (
            f"{_join_names(high)} reached its highest scale, by more growths than "
            "back-offs. In training overflows come more often the higher the scale "
            f"is; here {_overflows(sequence, 'higher')}"
        )


def _overflows(sequence: StepSequence, direction: str) -> str:
    """Return which steps overflow, and what to pass for another result."""
    recorded = "--file with the magnitudes of a run"
    if sequence.rate is None:
        return f"the same steps overflow whatever it is. Pass a {recorded}."
    return (
        f"{sequence.rate:g} of the steps do whatever it is. Pass a {direction} --rate, "
        f"or a {recorded}."
    )


def _join_names(names: list[str]) -> str:
    text = ", ".join(names[:_MOST_LISTED])
    rest_count = len(names) - _MOST_LISTED
    if rest_count > 0:
        text += f" and {rest_count} more"
    return text if len(names) == 1 else f"Each of {text}"


_MOST_LISTED = 3
