# SPDX-License-Identifier: Apache-2.0
"""`lossscale demo`: one network trained four ways, a table, a picture, a report."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from lossscale.cli.choices import refuse_together
from lossscale.cli.demo_runs import DemoRuns
from lossscale.cli.output import number, print_json, print_table, progress
from lossscale.cli.policies import parse_policy

if TYPE_CHECKING:
    from lossscale.core.policies import Policy
    from lossscale.demo import Run

_RUNS = 4


@click.command()
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Weights and batches.",
)
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True)
@click.option(
    "--policy",
    help="The policy of the dynamic run: torch, dynamic:growth_interval=50, ... "
    "[default: dynamic:growth_interval=20]",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("lossscale-demo.png"),
    show_default=True,
    help="Where the picture goes; the report is next to it, with the suffix .html.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, draw nothing.")
@click.pass_context
def demo(
    ctx: click.Context,
    seed: int,
    steps: int,
    policy: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Train a small network on real digits in float32 and, three ways, in float16.

    True float16 with float32 master weights, in NumPy: without a scale every gradient
    of this deep network rounds to zero.
    """
    from lossscale.demo import check_matplotlib, draw

    refuse_together(ctx, "as_json", "output")
    if not as_json:
        # What would fail after the training fails before it.
        check_matplotlib()
        if output.suffix != ".png":
            message = f"--output must be a .png file, got {str(output)!r}."
            raise click.UsageError(message)
        if not output.absolute().parent.is_dir():
            message = f"There is no folder {str(output.absolute().parent)!r}."
            raise click.UsageError(message)
    chosen = None if policy is None else parse_policy(policy)
    page = output.with_suffix(".html")
    with ExitStack() as stack:
        folder = None
        if not as_json:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        runs = _train(seed, steps, chosen, folder, page)
    if as_json:
        print_json(
            [
                {
                    "run": run.name,
                    "accuracy": run.accuracy,
                    "final_loss": run.final_loss,
                    "flushed": run.flushed,
                    "skipped": int(run.skipped.sum()),
                    "final_scale": run.final_scale,
                }
                for run in runs
            ]
        )
        return
    draw(runs, output)
    print_table(
        ["run", "test accuracy", "final loss", "gradients lost", "skipped", "scale"],
        [
            [
                run.name,
                f"{run.accuracy:.1%}",
                f"{run.final_loss:.4f}",
                f"{run.flushed:.1%}",
                str(int(run.skipped.sum())),
                number(run.final_scale),
            ]
            for run in runs
        ],
    )
    click.echo(
        "\ngradients lost: weight gradients that are zero here and not in float32;"
        "\nskipped: steps that overflowed and were left out."
        f"\n\nThe picture is {output.resolve()}"
        f"\nThe report of the four runs is {page.resolve()}"
    )


def _train(
    seed: int, steps: int, policy: "Policy | None", folder: Path | None, page: Path
) -> "list[Run]":
    """Train the four runs; with a folder for their records, write the report too."""
    from lossscale.core.portable import write_atomically
    from lossscale.demo import compare
    from lossscale.diagnostics import build_report

    with progress("training", _RUNS * steps) as advance:
        if folder is None:
            return compare(
                steps=steps, seed=seed, policy=policy, on_step=lambda _: advance()
            )
        with DemoRuns(folder, advance) as records:
            runs = compare(steps=steps, seed=seed, policy=policy, on_step=records.add)
        write_atomically(page, build_report(records.paths))
    return runs
