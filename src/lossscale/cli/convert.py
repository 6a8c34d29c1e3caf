# SPDX-License-Identifier: Apache-2.0
"""`lossscale convert`: a scaler state from one library's form to another's."""

import io
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from lossscale.cli.choices import Choice
from lossscale.cli.policies import parse_number, parse_policy, parse_settings
from lossscale.convert import (
    LIBRARIES,
    detect_library,
    from_library,
    to_library,
    with_scale,
)
from lossscale.core import portable
from lossscale.core.policies import Dynamic
from lossscale.core.state import ScaleState
from lossscale.errors import MissingPackageError, SettingError, StateError

_FORMS = ["lossscale", *LIBRARIES]


@click.command()
@click.argument("source", type=click.Path(allow_dash=True, path_type=Path))
@click.option("--to", "target", required=True, type=Choice(_FORMS))
@click.option(
    "--from",
    "library",
    type=Choice(_FORMS),
    help="The library that wrote the state. [default: detected by its keys]",
)
@click.option(
    "--policy",
    help="Settings that the state does not hold, such as megatron:hysteresis=4. "
    "[default: the library's preset]",
)
@click.option(
    "--scale",
    "scale_text",
    help="A scale instead of the state's, such as 2**16: one that collapsed to 0 "
    "cannot be used.",
)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path))
def convert(
    source: Path,
    target: str,
    library: str | None,
    policy: str | None,
    scale_text: str | None,
    output: Path | None,
) -> None:
    """Convert the state in SOURCE (- for stdin) to another form.

    SOURCE is JSON, or a file of torch.save, which torch reads with weights_only=True:
    nothing in it is executed. Other pickles are first written as JSON in the library's
    own environment: json.dump(scaler.state_dict(), file). What the other form cannot
    hold is listed on stderr.
    """
    values = _read(source)
    library = library or detect_library(values)
    if scale_text is not None:
        scale = parse_number("--scale", scale_text)
        values = with_scale(library, values, scale)
    try:
        read_policy, state = _interpret(library, values, policy)
    except StateError as error:
        message = f"{error}{_suggest_scale(library, values, policy)}"
        raise StateError(message) from error
    dropped: tuple[str, ...] = ()
    if target == "lossscale":
        result = portable.to_portable(read_policy, state)
    else:
        result, dropped = to_library(target, read_policy, state)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if output is None or str(output) == "-":
        click.echo(text, nl=False)
    else:
        portable.write_atomically(output, text)
    for line in dropped:
        click.echo(f"not kept: {line}", err=True)


def _read(source: Path) -> Mapping[str, Any]:
    """Return the mapping in a file or in the standard input."""
    if str(source) == "-":
        data, name = sys.stdin.buffer.read() if sys.stdin else b"", "The standard input"
    else:
        name = str(source)
        try:
            data = source.read_bytes()
        except OSError as error:
            message = f"{name} cannot be read: {error.strerror}."
            raise StateError(message) from None
    if data.startswith((_ZIP, _PICKLE)):
        return _read_torch(data, name)
    return portable.parse_json(data, name)


_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
"""How files of torch.save start, since torch 1.6 and before it."""


def _read_torch(data: bytes, name: str) -> Mapping[str, Any]:
    """Return the mapping in a file of torch.save, without executing any of it."""
    try:
        torch = import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is there, and something of its own is not
            message = f"{name} is a file of torch.save, and torch is broken: {error}"
            raise StateError(message) from None
        message = (
            f"{name} is a file of torch.save, and torch is not installed. Install it "
            "with: pip install 'lossscale[torch]'"
        )
        raise MissingPackageError(message) from None
    try:
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001  # torch raises many; some advise what is unsafe
        message = (
            f"{name} cannot be read by torch.load(..., weights_only=True): it is "
            "damaged, or holds more than numbers, tensors and mappings of them."
        )
        raise StateError(message) from None
    if not isinstance(values, Mapping):
        message = f"{name} holds {type(values).__name__}, expected a mapping."
        raise StateError(message)
    return values


def _interpret(
    library: str, values: Mapping[str, Any], text: str | None
) -> tuple[portable.SavedPolicy, ScaleState]:
    """Return the policy and the state that a mapping means."""
    if library == "lossscale":
        if text is not None:
            message = (
                "--policy cannot be used here: a lossscale state holds its policy."
            )
            raise click.UsageError(message)
        return portable.from_portable(values)
    policy, state = from_library(library, values, _dynamic(text))
    for name, value in parse_settings(text or "").items():
        if getattr(policy, name) != value:
            message = (
                f"--policy says {name}={value}, and the state of {library} itself says "
                f"{getattr(policy, name)}. Leave {name} out of --policy."
            )
            raise click.UsageError(message)
    return policy, state


def _suggest_scale(library: str, values: Mapping[str, Any], text: str | None) -> str:
    """Return what to type if the scale is all that is wrong with a state."""
    try:
        policy, _ = _interpret(library, with_scale(library, values, 1.0), text)
    except StateError:
        return ""
    return f" Give it another scale: --scale {policy.init().scale}"


def _dynamic(text: str | None) -> Dynamic | None:
    """Return the dynamic policy that a text names."""
    if text is None:
        return None
    policy = parse_policy(text)
    if not isinstance(policy, Dynamic):
        message = f"--policy must be a dynamic policy, got {text!r}."
        raise SettingError(message)
    return policy
