# SPDX-License-Identifier: Apache-2.0
"""Output helpers: tables and JSON on stdout, progress on stderr."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import frexp
from textwrap import wrap
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

_WIDTH_WITHOUT_TERMINAL = 160
"""Output into a pipe is not cut to 80 columns: its reader needs it whole."""


_UNBOUNDED = 10_000


class _Console(Console):
    """Leaves a closed pipe to the application, which knows that nothing is wrong."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_json(value: Any) -> None:
    """Print strict JSON."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1
) -> None:
    """Print a table, whole: as several with the same first column if it is too wide.

    Args:
        columns: The heading of each column.
        rows: The cells, as text.
        text_columns: How many columns are text, aligned left; the others are numbers.
    """
    console = _console()
    first, *indices = range(len(columns))
    while indices:
        count = 1
        while count < len(indices) and _fits(
            console, _table(columns, rows, [first, *indices[: count + 1]], text_columns)
        ):
            count += 1
        console.print(_table(columns, rows, [first, *indices[:count]], text_columns))
        indices = indices[count:]
        if indices:
            console.print()


def print_notes(notes: Sequence[str]) -> None:
    """Print paragraphs, the further lines of each indented."""
    console = _console()
    for note in notes:
        lines = wrap(
            note,
            console.width,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        # A word that is wider than the terminal, such as a path, is not cut.
        console.out("\n".join(lines), highlight=False)


def warn(note: str) -> None:
    """Print a remark on stderr."""
    click.echo(f"note: {note}", err=True)


@contextmanager
def defer_warnings() -> Iterator[None]:
    """Print warnings as remarks on stderr, at the end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        warn(str(warning.message))


def _console() -> Console:
    console = _Console()
    if console.is_terminal:
        return console
    return _Console(width=_WIDTH_WITHOUT_TERMINAL)


def _fits(console: Console, table: Table) -> bool:
    unbounded = console.options.update(max_width=_UNBOUNDED)
    return Measurement.get(console, unbounded, table).maximum <= console.width


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    indices: Sequence[int],
    text_columns: int,
) -> Table:
    """Return a table of some columns."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index in indices:
        justify: JustifyMethod = "left" if index < text_columns else "right"
        # A cell that is wider than the terminal goes on in the next line.
        table.add_column(columns[index], justify=justify, overflow="fold")
    for row in rows:
        # Text, not markup: 'lossscale[torch]' is no style.
        table.add_row(*(Text(row[index]) for index in indices))
    return table


@contextmanager
def progress(description: str, total: int) -> Iterator[Any]:
    """Show a progress bar on stderr, if that is a terminal; yields what advances it."""
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


def in_percent(advance: Callable[[], Any]) -> Callable[[int, int], None]:
    """Return what a reader tells its position to, for a bar of a hundred parts."""
    done = 0

    def on_progress(position: int, size: int) -> None:
        nonlocal done
        while done < 100 * position // max(1, size):
            done += 1
            advance()

    return on_progress


def number(value: float) -> str:
    """Write a scale or a fraction so that a person can read it."""
    if 1 <= value < _LONG and float(value).is_integer():
        return f"{int(value):,}"
    mantissa, exponent = frexp(value)
    extreme = value >= _LONG or value < _SMALL
    return f"2^{exponent - 1}" if extreme and mantissa == _HALF else f"{value:.6g}"


_LONG = 10**8
_SMALL = 1e-3
_HALF = 0.5
