# SPDX-License-Identifier: Apache-2.0
"""`lossscale simulate`: what policies do over a sequence of overflows."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lossscale.cli.choices import Choice, refuse_together, was_typed
from lossscale.cli.output import number, print_json, print_table, progress, warn
from lossscale.cli.policies import sweep
from lossscale.cli.sequences import StepSequence, explain_bounds, make_sequence
from lossscale.core.policies import Policy

if TYPE_CHECKING:
    from lossscale.diagnostics import Simulation


@click.command()
@click.option(
    "--policy",
    "-p",
    "texts",
    multiple=True,
    help="A preset, dynamic, fixed, auto_start, headroom or another kind, with "
    "settings: torch:growth_interval=100. May be given several times. "
    "[default: dynamic]",
)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    help="Try several values of a setting: growth_interval=100,200,400 or "
    "growth_interval=100:2000:20 (from:to:how many).",
)
@click.option(
    "--finite", "given", help="The steps themselves, such as 1110111: 0 is an overflow."
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="A recorded run as JSONL, one step per line (- for stdin): true, false, or "
    '{"finite": true, "magnitude": 3.1e-05, "scale": 65536}. The magnitude is the '
    "largest of the step's unscaled gradients.",
)
@click.option(
    "--dtype",
    type=Choice(["float16", "bfloat16", "float32"]),
    default="float16",
    show_default=True,
    help="The dtype of the gradients: what is too large in a file with magnitudes.",
)
@click.option(
    "--steps", type=click.IntRange(1, 10**9), default=10_000, show_default=True
)
@click.option(
    "--rate",
    type=click.FloatRange(0.0, 1.0),
    default=0.001,
    show_default=True,
    help="The fraction of overflows in a random sequence.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--trace", is_flag=True, help="Print every step of every policy.")
@click.option("--chart", is_flag=True, help="Draw the scales in the terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def simulate(
    ctx: click.Context,
    texts: tuple[str, ...],
    sweeps: tuple[str, ...],
    given: str | None,
    file: Path | None,
    dtype: str,
    steps: int,
    rate: float,
    seed: int,
    trace: bool,
    chart: bool,
    as_json: bool,
) -> None:
    """Run policies over a sequence of finite and non-finite steps.

    The sequence is given (--finite), read from a file (--file), or random (--steps,
    --rate, --seed). Which steps overflow depends on the scale only for steps of a file
    whose magnitude is known; all others are the same whatever the scale.
    """
    for options in (
        ("given", "file"),
        *((source, name) for source in ("given", "file") for name in _RANDOM),
        ("chart", "trace"),
        ("chart", "as_json"),
    ):
        refuse_together(ctx, *options)
    if file is None and was_typed(ctx, "dtype"):
        message = "--dtype is for the magnitudes of a --file; give one."
        raise click.UsageError(message)
    policies: dict[str, Policy] = {}
    for text in texts or ("dynamic",):
        policies |= sweep(text, sweeps)
    sequence = make_sequence(given, file, dtype, steps, rate, seed)
    if trace:
        _print_trace(policies, sequence, as_json=as_json)
        results = {}
    else:
        results = _run(policies, sequence)
        _print_results(results, sequence, chart=chart, as_json=as_json)
    remarks = (
        *sequence.remarks,
        *_explain_unmeasured(policies, sequence),
        *explain_bounds(results, sequence),
    )
    for remark in remarks:
        warn(remark)


def _explain_unmeasured(
    policies: dict[str, Policy], sequence: StepSequence
) -> Iterator[str]:
    """Yield which policies ran without the measurements that they read."""
    import numpy as np

    from lossscale.diagnostics.unmeasured import explain_unmeasured

    finite = sequence.finite
    known = np.zeros_like(finite)
    if sequence.magnitudes is not None:
        known = finite & ~np.isnan(sequence.magnitudes)
    yield from explain_unmeasured(
        policies, measured=int(known.sum()), steps=int(finite.sum())
    )


_MOST_TRACED = 10_000
_RANDOM = ("steps", "rate", "seed")


def _run(
    policies: dict[str, Policy], sequence: StepSequence
) -> "dict[str, Simulation]":
    from lossscale.diagnostics import simulate as run

    with progress("simulating", len(policies)) as advance, _warnings_as_remarks():
        results = run(
            list(policies.values()),
            sequence.finite,
            magnitudes=sequence.magnitudes,
            dtype=sequence.dtype,
            on_policy=advance,
        )
    return dict(zip(policies, results, strict=True))


@contextmanager
def _warnings_as_remarks() -> Iterator[None]:
    """Show a warning as a sentence, without a place in our source."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_others, **_more: warn(str(message))
        yield


def _print_results(
    results: "dict[str, Simulation]",
    sequence: StepSequence,
    *,
    chart: bool,
    as_json: bool,
) -> None:
    if as_json:
        print_json([_summary(name, result) for name, result in results.items()])
        return
    if chart:
        _draw(results)
        return
    click.echo(f"{sequence.headline}\n")
    columns = ["policy", "skipped", "growths", "back-offs", "lowest", "highest"]
    print_table(
        [*columns, "final scale"],
        [
            [
                name,
                f"{result.skipped:,}",
                f"{result.growths:,}",
                f"{result.backoffs:,}",
                number(float(result.scales.min())),
                number(float(result.scales.max())),
                number(float(result.final.scale)),
            ]
            for name, result in results.items()
        ],
    )


def _summary(name: str, result: "Simulation") -> dict[str, Any]:
    """Return one policy's result, with the scale at up to 200 steps."""
    import numpy as np

    points = np.unique(np.linspace(0, result.length, 200).round().astype(np.int64))
    return {
        "policy": name,
        "steps": result.length,
        "skipped": result.skipped,
        "growths": result.growths,
        "backoffs": result.backoffs,
        "lowest": float(result.scales.min()),
        "highest": float(result.scales.max()),
        "final": {
            "scale": float(result.final.scale),
            "good_steps": int(result.final.good_steps),
            "bad_steps": int(result.final.bad_steps),
        },
        "trajectory": {
            "steps": points.tolist(),
            "scales": [float(value) for value in result.scale_after(points)],
        },
    }


def _print_trace(
    policies: dict[str, Policy], sequence: StepSequence, *, as_json: bool
) -> None:
    """Print the state after every step."""
    from lossscale.diagnostics.simulation import trace

    if sequence.finite.size * len(policies) > _MOST_TRACED:
        message = f"--trace prints at most {_MOST_TRACED:,} steps, of all policies."
        raise click.UsageError(message)
    rows = []
    for name, policy in policies.items():
        states = trace(
            policy,
            sequence.finite,
            magnitudes=sequence.magnitudes,
            dtype=sequence.dtype,
        )
        for step, (finite, state) in enumerate(states, start=1):
            numbers = (value.item() for value in state[:3])
            rows.append((name, step, bool(finite), *numbers))
    columns = ["policy", "step", "finite", "scale", "good_steps", "bad_steps"]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    cells = [
        [name, f"{step:,}", "yes" if flag else "no", number(scale), str(good), str(bad)]
        for name, step, flag, scale, good, bad in rows
    ]
    print_table(columns, cells)


def _draw(results: "dict[str, Simulation]") -> None:
    """Draw the exponents of the scales over the steps, one chart for each policy.

    Lines in one chart would differ by colour alone, which a pipe does not have.
    """
    import numpy as np
    from uniplot import plot_to_string

    blocks = _shows_blocks()
    length = next(iter(results.values())).length
    points = np.linspace(0, length, 400).round()
    for name, result in results.items():
        chart = plot_to_string(
            xs=points,
            ys=np.log2(result.scale_after(points)),
            lines=True,
            color=False,
            width=90,
            height=10,
            title=f"{name}: log2 of the scale over the steps",
            character_set="block" if blocks else "ascii",
        )
        click.echo(chart if blocks else chart.translate(_PLAIN_FRAME))


_PLAIN_FRAME = str.maketrans("\u250c\u2510\u2514\u2518\u2502\u2500\u2594", "++++|--")


def _shows_blocks() -> bool:
    """Whether the output can show block characters; a pipe on Windows cannot."""
    try:
        "\u2588\u2500".encode(sys.stdout.encoding or "ascii")
    except UnicodeError:
        return False
    return True
