# SPDX-License-Identifier: Apache-2.0
"""`lossscale simulate`: what policies do over a sequence of overflows."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lossscale.cli.output import number, print_json, print_table, progress
from lossscale.cli.policies import sweep
from lossscale.core.errors import StateError
from lossscale.core.policies import Policy
from lossscale.core.state import Signal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@click.command()
@click.option(
    "--policy",
    "-p",
    "texts",
    multiple=True,
    help="A preset, dynamic or fixed, with settings: torch:growth_interval=100. "
    "May be given several times. [default: dynamic]",
)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    help="Try several values of a setting: growth_interval=100,200,400 or "
    "growth_interval=100:2000:20 (from:to:how many).",
)
@click.option(
    "--finite", "given", help="The steps themselves, such as 1110111: 0 is bad."
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='A JSONL file with one step per line: true, false, or {"finite": true}.',
)
@click.option(
    "--steps", type=click.IntRange(1, 10**9), default=10_000, show_default=True
)
@click.option(
    "--rate",
    type=click.FloatRange(0.0, 1.0),
    default=0.001,
    show_default=True,
    help="The share of overflows in a random sequence.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--trace", is_flag=True, help="Print every step of every policy.")
@click.option("--chart", is_flag=True, help="Draw the scales in the terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(
    texts: tuple[str, ...],
    sweeps: tuple[str, ...],
    given: str | None,
    file: Path | None,
    steps: int,
    rate: float,
    seed: int,
    trace: bool,
    chart: bool,
    as_json: bool,
) -> None:
    """Run policies over a sequence of finite and non-finite steps.

    The sequence is given (--finite), read from a file (--file), or random (--steps,
    --rate, --seed).
    """
    from lossscale.diagnostics import simulate as run

    policies: dict[str, Policy] = {}
    for text in texts or ("dynamic",):
        policies |= sweep(text, sweeps)
    finite = _sequence(given, file, steps, rate, seed)
    if trace:
        _print_trace(policies, finite, as_json=as_json)
        return
    with progress("simulating", len(policies)) as advance:
        results = run(list(policies.values()), finite, on_policy=advance)
    if as_json:
        print_json([_summary(n, r) for n, r in zip(policies, results, strict=True)])
        return
    if chart:
        _draw(policies, results)
        return
    click.echo(f"{finite.size:,} steps, {int((~finite).sum()):,} of them not finite\n")
    columns = ["policy", "growths", "back-offs", "lowest", "highest", "final scale"]
    print_table(
        columns,
        [
            [
                name,
                f"{result.growths:,}",
                f"{result.backoffs:,}",
                number(float(result.scales.min())),
                number(float(result.scales.max())),
                number(float(result.final.scale)),
            ]
            for name, result in zip(policies, results, strict=True)
        ],
    )


_MOST_TRACED = 10_000


def _sequence(
    given: str | None, file: Path | None, steps: int, rate: float, seed: int
) -> "npt.NDArray[np.bool_]":
    """Return the flags of the steps."""
    import numpy as np

    if given is not None and file is not None:
        message = "--finite and --file were both given; give one of them."
        raise click.UsageError(message)
    if given is not None:
        if not given or set(given) - set("01"):
            message = f"--finite takes a row of 0 and 1 such as 1110111, got {given!r}."
            raise click.UsageError(message)
        return np.array([digit == "1" for digit in given])
    if file is not None:
        return _read(file)
    if rate != rate:  # noqa: PLR0124  # NaN passes every range
        message = "--rate must be a number from 0 to 1, got nan."
        raise click.UsageError(message)
    return np.random.default_rng(seed).random(steps) >= rate


def _read(file: Path) -> "npt.NDArray[np.bool_]":
    """Read one flag per line."""
    import numpy as np

    flags = []
    with file.open(encoding="utf-8") as lines:
        for place, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value: Any = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                value = value.get("finite")
            if not isinstance(value, bool):
                message = (
                    f"{file}, line {place}: expected true, false or an object with "
                    f'"finite", got {line.strip()[:60]!r}.'
                )
                raise StateError(message)
            flags.append(value)
    if not flags:
        message = f"{file} holds no step."
        raise StateError(message)
    return np.array(flags)


def _summary(name: str, result: Any) -> dict[str, Any]:
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
            "good": int(result.final.good),
            "bad": int(result.final.bad),
        },
        "trajectory": {
            "steps": points.tolist(),
            "scales": [float(value) for value in result.scale_after(points)],
        },
    }


def _print_trace(
    policies: dict[str, Policy], finite: "npt.NDArray[np.bool_]", *, as_json: bool
) -> None:
    """Print the state after every step."""
    import lossscale.numpy as verbs

    if finite.size * len(policies) > _MOST_TRACED:
        message = f"--trace prints at most {_MOST_TRACED:,} steps, of all policies."
        raise click.UsageError(message)
    rows = []
    for name, policy in policies.items():
        state = verbs.init(policy)
        for step, flag in enumerate(finite, start=1):
            state = verbs.update(policy, state, Signal(flag))
            rows.append((name, step, bool(flag), *(value.item() for value in state)))
    columns = ["policy", "step", "finite", "scale", "good", "bad"]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    cells = [
        [name, f"{step:,}", "yes" if flag else "no", number(scale), str(good), str(bad)]
        for name, step, flag, scale, good, bad in rows
    ]
    print_table(columns, cells)


def _draw(policies: dict[str, Policy], results: list[Any]) -> None:
    """Draw the exponents of the scales over the steps, one chart for each policy.

    Lines in one chart could only be told apart by colour, which a pipe does not have.
    """
    import numpy as np
    from uniplot import plot_to_string

    blocks = _shows_blocks()
    points = np.linspace(0, results[0].length, 400).round()
    for name, result in zip(policies, results, strict=True):
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
