# SPDX-License-Identifier: Apache-2.0
"""`lossscale report`: what happened in recorded runs, on one page."""

from pathlib import Path

import click

from lossscale.cli.choices import Choice
from lossscale.cli.output import defer_warnings, in_percent, progress
from lossscale.core.portable import write_atomically

_FORMATS = ("html", "md", "json")


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Where the report goes. [default: report.html; md and json: printed]",
)
@click.option(
    "--format",
    "chosen",
    type=Choice(_FORMATS),
    help="html, md or json. [default: that of the output's suffix, or html]",
)
def report(runs: tuple[Path, ...], output: Path | None, chosen: str | None) -> None:
    """Report on RUNS, the files that lossscale.diagnostics.Recorder wrote.

    The page is one file: it opens from the disk and loads nothing. Several runs are
    aligned by their steps and compared.
    """
    from lossscale.diagnostics import build_report

    suffix = "" if output is None else output.suffix.removeprefix(".")
    form = chosen or (suffix if suffix in _FORMATS else "html")
    if output is None and form == "html":
        output = Path("report.html")
    if output is not None:
        check_output(output, runs)
    with defer_warnings(), progress("reading", 100) as advance:
        text = build_report(runs, format=form, on_progress=in_percent(advance))
    if output is None:
        click.echo(text, nl=False)
        return
    write_atomically(output, text)
    click.echo(f"The report is {output.resolve()}")


def check_output(output: Path, runs: tuple[Path, ...] = ()) -> None:
    """Fail if a report cannot go to a file: before the work, and without a trace."""
    if output.is_dir():
        message = f"--output must be a file, and {str(output)!r} is a folder."
        raise click.UsageError(message)
    if not output.absolute().parent.is_dir():
        message = f"There is no folder {str(output.absolute().parent)!r}."
        raise click.UsageError(message)
    if any(run.exists() and output.exists() and run.samefile(output) for run in runs):
        message = f"--output {str(output)!r} is one of the runs; give another file."
        raise click.UsageError(message)
