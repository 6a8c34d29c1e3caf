# SPDX-License-Identifier: Apache-2.0
"""`lossscale backtest`: what other policies would have done in a recorded run."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lossscale.cli.choices import Choice
from lossscale.cli.output import (
    defer_warnings,
    in_percent,
    number,
    print_table,
    progress,
    warn,
)
from lossscale.cli.policies import parse_policy
from lossscale.cli.report import check_output, choose_format
from lossscale.core.portable import write_atomically

if TYPE_CHECKING:
    from lossscale.core.policies import Policy
    from lossscale.diagnostics import Backtest, RunFile

_FORMATS = ("html", "md", "json")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "-p",
    "texts",
    multiple=True,
    required=True,
    help="A preset, dynamic, fixed, auto_start, headroom or another kind, with "
    "settings: torch:growth_interval=100, headroom:margin=2. May be given several "
    "times.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Where the results go, such as backtest.html. [default: printed]",
)
@click.option(
    "--format",
    "chosen",
    type=Choice(_FORMATS),
    help="html, md or json. [default: that of the output's suffix, or a table]",
)
def backtest(
    run: Path, texts: tuple[str, ...], output: Path | None, chosen: str | None
) -> None:
    """Say what other policies would have done in RUN.

    RUN is a file that lossscale.diagnostics.Recorder wrote, with magnitudes. An html
    page is the report of the run, with the scales of the other policies drawn in it.
    """
    if output is None and chosen == "html":
        output = Path("backtest.html")
    if output is not None:
        check_output(output, (run,))
    form = chosen if output is None else choose_format(output, chosen)
    policies: dict[str, Policy] = {text: parse_policy(text) for text in texts}
    with defer_warnings():
        read, result = _run(run, policies)
        text = _write(form, read, result)
    if output is not None:
        write_atomically(output, text)
        click.echo(f"The backtest is {output.resolve()}")
    elif form is not None:
        click.echo(text, nl=False)
    else:
        _print(read, result)


def _run(path: Path, policies: "dict[str, Policy]") -> "tuple[RunFile, Backtest]":
    from lossscale.diagnostics import backtest as run_policies
    from lossscale.diagnostics import read_run

    with progress("reading", 100) as advance:
        read = read_run(path, on_progress=in_percent(advance))
    pieces = -(-len(read.blocks) // 64)
    with progress("trying", pieces + len(policies)) as advance:
        return read, run_policies(read, policies, on_progress=advance)


def _write(form: str | None, run: "RunFile", result: "Backtest") -> str:
    """Return the results in a format; an empty text for the table."""
    from lossscale.diagnostics.backtests import tables

    if form == "html":
        from lossscale.diagnostics.backtests.page import make_backtest_page

        return make_backtest_page(run, result)
    if form == "md":
        return tables.make_markdown(result, run.title)
    return tables.make_json(result, run.title) if form == "json" else ""


def _print(run: "RunFile", result: "Backtest") -> None:
    """Print the results as a table, and what they are worth on stderr."""
    from lossscale.diagnostics.backtests import tables
    from lossscale.diagnostics.report.markdown import printable

    title = printable(" ".join(run.title.split()))
    click.echo(f"{title}: {result.steps.size:,} steps, {result.dtype}\n")
    print_table(tables.HEADS, tables.list_rows(result, number))
    for remark in result.remarks:
        warn(remark)
