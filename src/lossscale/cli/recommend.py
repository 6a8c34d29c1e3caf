# SPDX-License-Identifier: Apache-2.0
"""`lossscale recommend`: policy, start and interval for the next run, and why."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lossscale.cli.choices import Choice
from lossscale.cli.output import (
    defer_warnings,
    in_percent,
    print_json,
    print_notes,
    progress,
    warn,
)

if TYPE_CHECKING:
    from lossscale.diagnostics import Recommendation, RunFile


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "chosen",
    type=Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="text or json.",
)
def recommend(run: Path, chosen: str) -> None:
    """Recommend a policy for the next run like RUN, as code to paste.

    RUN is a file that lossscale.diagnostics.Recorder wrote. Every reason is something
    that was seen in it.
    """
    with defer_warnings():
        read, result = _run(run)
    if chosen == "json":
        from lossscale.diagnostics.backtests.tables import recommendation_as_json

        print_json(recommendation_as_json(result, read.title))
        return
    if result.policy is None:
        print_notes(["No recommendation.", *result.reasons])
    else:
        print_notes([f"- {reason}" for reason in result.reasons])
        click.echo(f"\n{result.code}", nl=False)
    for limit in result.limits:
        warn(limit)


def _run(path: Path) -> "tuple[RunFile, Recommendation]":
    from lossscale.diagnostics import read_run
    from lossscale.diagnostics import recommend as find_policy

    with progress("reading", 100) as advance:
        read = read_run(path, on_progress=in_percent(advance))
    with progress("trying", -(-len(read.blocks) // 64)) as advance:
        return read, find_policy(read, on_progress=advance)
