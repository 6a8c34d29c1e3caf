# SPDX-License-Identifier: Apache-2.0
"""`lossscale watch`: a run that is being recorded, live in the terminal."""

import shutil
from pathlib import Path

import click

from lossscale.cli.output import defer_warnings
from lossscale.errors import MissingPackageError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print the same as text, and end.")
def watch(run: Path, once: bool) -> None:
    """Follow RUN while it is recorded: scale, loss, norm, skips, names and alarms.

    q quits. Needs Textual: pip install 'lossscale[cli,watch]'; --once does not.
    """
    from lossscale.diagnostics.live import render_run
    from lossscale.diagnostics.records.follower import RunFollower

    with defer_warnings():
        follower = RunFollower(run)
    if once:
        width = shutil.get_terminal_size((100, 24)).columns
        click.echo("\n".join(render_run(follower, width)))
        return
    try:
        from lossscale.cli.watch_app import WatchApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        message = (
            "The live view needs the package textual, which is not installed. Install "
            "it with: pip install 'lossscale[watch]', or print it with --once."
        )
        raise MissingPackageError(message) from None
    WatchApp(follower).run()
