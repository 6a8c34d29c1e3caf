# SPDX-License-Identifier: Apache-2.0
"""`lossscale convert`: a scaler state from one library's form to another's."""

import json
import sys
from pathlib import Path

import click

from lossscale.cli.policies import parse_policy
from lossscale.core import portable
from lossscale.core.converters import from_library, recognise, to_library
from lossscale.core.errors import SettingError
from lossscale.core.libraries import LIBRARIES
from lossscale.core.policies import Dynamic

_FORMS = ["lossscale", *LIBRARIES]


@click.command()
@click.argument("source", type=click.Path(allow_dash=True, path_type=Path))
@click.option("--to", "target", required=True, type=click.Choice(_FORMS))
@click.option(
    "--from",
    "library",
    type=click.Choice(_FORMS),
    help="Whose state it is. [default: seen by its keys]",
)
@click.option(
    "--policy",
    help="Settings that the state does not hold, such as megatron:hysteresis=4. "
    "[default: the library's preset]",
)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path))
def convert(
    source: Path,
    target: str,
    library: str | None,
    policy: str | None,
    output: Path | None,
) -> None:
    """Convert the state in SOURCE, a JSON file (- for stdin), to another form.

    What a library saves with pickle is first written as JSON by that library's own
    environment: json.dump(scaler.state_dict(), file). Nothing is ever unpickled here.
    What the other form cannot hold is listed on stderr.
    """
    if str(source) == "-":
        text = sys.stdin.read() if sys.stdin else ""
        values = portable.parse_json(text, "The standard input")
    else:
        values = portable.read_json(source)
    library = library or recognise(values)
    if library == "lossscale":
        if policy is not None:
            message = "--policy has no use here: a lossscale state holds its policy."
            raise click.UsageError(message)
        read_policy, state = portable.from_portable(values)
    else:
        read_policy, state = from_library(library, values, _dynamic(policy))
    lost: tuple[str, ...] = ()
    if target == "lossscale":
        result = portable.to_portable(read_policy, state)
    else:
        result, lost = to_library(target, read_policy, state)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if output is None or str(output) == "-":
        click.echo(text, nl=False)
    else:
        portable.write_atomically(output, text)
    for line in lost:
        click.echo(f"not kept: {line}", err=True)


def _dynamic(text: str | None) -> Dynamic | None:
    """Return the dynamic policy that a text names."""
    if text is None:
        return None
    policy = parse_policy(text)
    if not isinstance(policy, Dynamic):
        message = f"--policy must be a dynamic policy, got {text!r}."
        raise SettingError(message)
    return policy
