# SPDX-License-Identifier: Apache-2.0
"""Draw the four runs as one PNG.

Imports matplotlib inside `draw` only, so that the rest of the demo needs NumPy alone.
Uses the object interface, not pyplot: no window, no global state.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from lossscale.errors import MissingPackageError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from lossscale.demo.training import Run

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_COLOURS = ("#999999", "#D55E00", "#0072B2", "#009E73")
_WIDTHS = (5.0, 2.0, 1.6, 1.6)
_STYLES = ("-", "-", "-", (0, (4, 2)))
_INK = "#333333"


def check_matplotlib() -> None:
    """Raise now, before a long training, if matplotlib is not installed.

    Raises:
        MissingPackageError: Saying what to type.
    """
    if find_spec("matplotlib") is None:
        message = "A picture needs matplotlib: pip install 'lossscale[plot]'"
        raise MissingPackageError(message)


def draw(runs: list[Run], path: Path | str) -> None:
    """Draw loss and scale over time.

    Args:
        runs: What `compare` returned.
        path: PNG file to write.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 7), dpi=150, facecolor="white")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    # Space at the right for labels next to the lines they name.
    figure.subplots_adjust(left=0.09, right=0.69, top=0.94, bottom=0.08, hspace=0.08)
    _draw_losses(upper, runs)
    _draw_scales(lower, runs)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#EEEEEE")
        axes.set_axisbelow(True)
    figure.savefig(path)


def _draw_losses(axes: Axes, runs: list[Run]) -> None:
    steps = len(runs[0].losses)
    for run, colour, width, style in zip(runs, _COLOURS, _WIDTHS, _STYLES, strict=True):
        smooth = _smooth(run.losses)
        axes.plot(smooth, color=colour, linewidth=width, linestyle=style)
    axes.set_yscale("log")
    axes.set_xlim(0, steps)
    axes.set_ylabel("training loss (mean of 10 steps)", color=_INK)
    axes.set_title(
        "Eight layers on handwritten digits: same start, same batches",
        loc="left",
        color=_INK,
        fontweight="bold",
    )
    heights = _spread([float(_smooth(run.losses)[-1]) for run in runs])
    for run, colour, height in zip(runs, _COLOURS, heights, strict=True):
        axes.annotate(
            f"{run.name}\n{run.accuracy:.1%} of test images right",
            (steps * 1.02, height),
            color="#666666" if colour == _COLOURS[0] else colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def _draw_scales(axes: Axes, runs: list[Run]) -> None:
    steps = len(runs[0].losses)
    for run, colour in list(zip(runs, _COLOURS, strict=True))[1:]:
        exponents = np.log2(run.scales)
        axes.step(
            np.arange(steps), exponents, where="post", color=colour, linewidth=1.8
        )
        times = np.flatnonzero(run.skipped)
        axes.plot(
            times, exponents[times], "x", color=colour, markersize=7, clip_on=False
        )
        axes.annotate(
            f"{run.name.removeprefix('float16, ')}, {len(times)} skipped",
            (steps * 1.02, exponents[-1]),
            color=colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_ylabel("scale, as a power of two", color=_INK)
    axes.set_xlabel(
        "step        (crosses mark steps that overflowed and were skipped)", color=_INK
    )
    axes.set_xticks(np.linspace(0, steps, 7, dtype=int))
    axes.set_ylim(bottom=-1)


def _smooth(losses: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[float]:
    """Average each step with up to nine before it."""
    return [
        float(np.mean(losses[max(0, end - 10) : end]))
        for end in range(1, len(losses) + 1)
    ]


def _spread(heights: list[float], factor: float = 2.4) -> list[float]:
    """Move labels apart on a logarithmic axis until neighbours differ by `factor`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    result = list(heights)
    for lower, upper in pairwise(order):
        result[upper] = max(result[upper], result[lower] * factor)
    return result
