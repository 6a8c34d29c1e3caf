# SPDX-License-Identifier: Apache-2.0
"""`lossscale explain`: why a step of a recorded run was skipped."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from lossscale.cli.choices import Choice
from lossscale.cli.output import defer_warnings, print_json, print_notes, progress
from lossscale.errors import LossScaleError


@click.command()
@click.argument("run", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="A skipped step. [default: the one that led to the first alarm, or the first]",
)
@click.option(
    "--format",
    "chosen",
    type=Choice(("md", "json")),
    default="md",
    show_default=True,
    help="md for sentences, json for machines.",
)
def explain(run: Path, step: int | None, chosen: str) -> None:
    """Say why a step of RUN was skipped, as far as the record shows (- for stdin).

    RUN is a file that lossscale.diagnostics.Recorder wrote. To find the operation that
    failed, run the batch again with the explain function of your framework.
    """
    from lossscale.diagnostics import explain_run
    from lossscale.diagnostics.report.markdown import escape_line

    with _as_file(run) as path, defer_warnings(), progress("reading", 100) as advance:
        done = 0

        def on_progress(position: int, size: int) -> None:
            nonlocal done
            while done < 100 * position // max(1, size):
                done += 1
                advance()

        explanation = explain_run(path, step=step, on_progress=on_progress)
    if chosen == "json":
        print_json(explanation.to_dict())
        return
    title = "The standard input" if str(run) == "-" else explanation.title
    print_notes([f"## {escape_line(title)}", ""])
    print_notes(
        [f"- {escape_line(text, len(text))}" for text in str(explanation).splitlines()]
    )


@contextmanager
def _as_file(run: Path) -> Iterator[Path]:
    """Yield a path that can be read twice: stdin is kept in a file meanwhile."""
    if str(run) != "-":
        yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stdin.jsonl"
        path.write_bytes(sys.stdin.buffer.read() if sys.stdin else b"")
        try:
            yield path
        except LossScaleError as error:
            text = str(error).replace(str(path), "The standard input")
            raise type(error)(text) from None
