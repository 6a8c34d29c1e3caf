# SPDX-License-Identifier: Apache-2.0
"""`lossscale report`: what happened in recorded runs, on one page."""

import os
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
    help="Where the report goes; - prints it. [default: report.html; md and json: -]",
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

    is_printed = output is not None and str(output) == "-"
    if is_printed:
        output = None
    elif output is None and chosen in (None, "html"):
        output = Path("report.html")
    if output is not None:
        check_output(output, runs)
    form = choose_format(output, chosen)
    with defer_warnings(), progress("reading", 100) as advance:
        text = build_report(runs, format=form, on_progress=in_percent(advance))
    if output is None:
        click.echo(text, nl=False)
        return
    write_atomically(output, text)
    click.echo(f"The report is {output.resolve()}")


def check_output(output: Path, runs: tuple[Path, ...] = ()) -> None:
    """Fail if a report cannot go to a file: before the work, and without a trace."""
    if str(output) == "-":
        message = "--output must be a file; '-' is none. Leave it out to print."
        raise click.UsageError(message)
    if output.is_dir():
        message = f"--output must be a file, and {str(output)!r} is a folder."
        raise click.UsageError(message)
    if output.exists() and not output.is_file():
        message = f"--output must be a file, and {str(output)!r} is a device or pipe."
        raise click.UsageError(message)
    if not output.absolute().parent.is_dir():
        message = f"There is no folder {str(output.absolute().parent)!r}."
        raise click.UsageError(message)
    target = os.path.realpath(output)
    for run in runs:
        if target == os.path.realpath(run) or _is_same(run, output):
            message = f"--output {str(output)!r} is one of the runs; give another file."
            raise click.UsageError(message)
        rollup = Path(f"{run}.rollup")
        if target == os.path.realpath(rollup) or _is_same(rollup, output):
            message = (
                f"--output {str(output)!r} is the roll-up of a run; give another file."
            )
            raise click.UsageError(message)


def _is_same(path: Path, output: Path) -> bool:
    return path.exists() and output.exists() and path.samefile(output)


def choose_format(output: Path | None, chosen: str | None) -> str:
    """Return the format of a report: the one that was chosen, or that of its file.

    Raises:
        UsageError: If the ending of the file says that it is something else.
    """
    suffix = "" if output is None else output.suffix.lower()
    form = chosen or _SUFFIXES.get(suffix, "html")
    if suffix and suffix not in _ENDINGS[form]:
        message = (
            f"--output {str(output)!r} does not end as a report in {form} does: "
            f"{' or '.join(_ENDINGS[form])}."
        )
        raise click.UsageError(message)
    return form


_ENDINGS = {
    "html": (".html", ".htm"),
    "md": (".md", ".markdown", ".txt"),
    "json": (".json", ".txt"),
}
_SUFFIXES = {
    ".html": "html",
    ".htm": "html",
    ".md": "md",
    ".markdown": "md",
    ".json": "json",
}
