# SPDX-License-Identifier: Apache-2.0
"""`lossscale demo`: one network trained four ways, a table and a picture."""

from pathlib import Path

import click

from lossscale.cli.choices import refuse_together
from lossscale.cli.output import number, print_json, print_table, progress
from lossscale.cli.policies import parse_policy

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
    help="Where the picture goes.",
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
    from lossscale.demo import check_matplotlib, compare, draw

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
    with progress("training", _RUNS * steps) as advance:
        runs = compare(
            steps=steps, seed=seed, policy=chosen, on_step=lambda *_: advance()
        )
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
    )
