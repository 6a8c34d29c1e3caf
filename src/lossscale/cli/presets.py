# SPDX-License-Identifier: Apache-2.0
"""`lossscale presets`: what other libraries really do."""

from dataclasses import asdict
from typing import Any

import click

from lossscale.cli.output import number, print_json, print_table
from lossscale.core.presets import PRESETS


@click.command()
@click.argument("name", required=False, type=click.Choice(list(PRESETS)))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def presets(name: str | None, as_json: bool) -> None:
    """Show every setting of every preset, or all about one of them."""
    chosen = [PRESETS[name]] if name else list(PRESETS.values())
    if as_json:
        print_json({preset.name: asdict(preset) for preset in chosen})
        return
    # One row per setting and one column per preset would be wider than a terminal.
    settings = list(asdict(chosen[0].policy))
    rows = [
        [preset.name, *(_cell(value) for value in asdict(preset.policy).values())]
        for preset in chosen
    ]
    groups = (settings[:7], settings[7:])
    for group in groups:
        places = [settings.index(setting) + 1 for setting in group]
        print_table(
            ["preset", *group], [[row[0], *(row[i] for i in places)] for row in rows]
        )
        click.echo()
    for preset in chosen:
        click.echo(f"{preset.name}: {preset.source}\n    {preset.differs}")


def _cell(value: Any) -> str:
    """Write a setting."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, (int, float)) else str(value)
