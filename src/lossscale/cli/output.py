# SPDX-License-Identifier: Apache-2.0
"""How commands speak: tables and JSON on stdout, progress on stderr."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import frexp
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

_WIDTH_WITHOUT_TERMINAL = 160
"""In a pipe nothing is cut to 80 columns: whoever reads it wants it whole."""


class _Console(Console):
    """Leaves a closed pipe to the application, which knows that nothing is wrong."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_json(value: Any) -> None:
    """Print strict JSON."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: names and advice to the left, everything else to the right."""
    console = _Console()
    if not console.is_terminal:
        console = _Console(width=_WIDTH_WITHOUT_TERMINAL)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, column in enumerate(columns):
        text = place == 0 or column == "what to do"
        table.add_column(column, justify="left" if text else "right")
    for row in rows:
        # Text, not markup: 'lossscale[torch]' is no style.
        table.add_row(*map(Text, row))
    console.print(table)


@contextmanager
def progress(description: str, total: int) -> Iterator[Any]:
    """Show a progress bar on stderr, if that is a terminal; yields what advances it."""
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


def number(value: float) -> str:
    """Write a scale or a share so that a person can read it."""
    if 1 <= value < _LONG and float(value).is_integer():
        return f"{int(value):,}"
    mantissa, exponent = frexp(value)
    extreme = value >= _LONG or value < _SMALL
    return f"2^{exponent - 1}" if extreme and mantissa == _HALF else f"{value:.6g}"


_LONG = 10**8
_SMALL = 1e-3
_HALF = 0.5
