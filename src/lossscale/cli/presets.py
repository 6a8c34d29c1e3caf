# SPDX-License-Identifier: Apache-2.0
"""`lossscale presets`: what other libraries really do."""

from dataclasses import asdict
from typing import Any

import click

from lossscale.cli.choices import Choice
from lossscale.cli.output import number, print_json, print_notes, print_table
from lossscale.presets import PRESETS


@click.command()
@click.argument("name", required=False, metavar="[NAME]", type=Choice(list(PRESETS)))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def presets(name: str | None, as_json: bool) -> None:
    """Show every setting of every preset, or all about one of them."""
    chosen = [PRESETS[name]] if name else list(PRESETS.values())
    if as_json:
        print_json({preset.name: asdict(preset) for preset in chosen})
        return
    rows = [
        [preset.name, *(_cell(value) for value in asdict(preset.policy).values())]
        for preset in chosen
    ]
    print_table(["preset", *asdict(chosen[0].policy)], rows)
    click.echo()
    print_notes([f"{x.name}: {x.source} {x.differs}" for x in chosen])


def _cell(value: Any) -> str:
    """Write a setting."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, (int, float)) else str(value)
