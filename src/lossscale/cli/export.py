# SPDX-License-Identifier: Apache-2.0
"""`lossscale export`: the steps of a recorded run as a Parquet file."""

from pathlib import Path

import click

from lossscale.cli.output import defer_warnings
from lossscale.cli.report import check_output

_ENDINGS = ("", ".parquet", ".pq")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    help="The Parquet file.",
)
def export(run: Path, output: Path) -> None:
    """Write the steps of RUN to a Parquet file; needs pyarrow."""
    from lossscale.diagnostics import export_parquet

    check_output(output, (run,))
    if output.suffix.lower() not in _ENDINGS:
        message = (
            f"--output {str(output)!r} does not end as a Parquet file does: .parquet."
        )
        raise click.UsageError(message)
    with defer_warnings():
        count = export_parquet(run, output)
    click.echo(f"{count:,} steps are in {output.resolve()}")
