# SPDX-License-Identifier: Apache-2.0
"""`lossscale doctor`: what is installed, what works, and what to type if not."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import click

from lossscale.cli.output import print_json, print_table, progress

_TIMEOUT_SECONDS = 120


class _Part(NamedTuple):
    """Something that lossscale can use."""

    name: str
    packages: tuple[str, ...]
    """Names under which it is distributed; the first one found counts."""
    probe: str
    """A program that fails, saying why, if the part does not work."""
    remedy: str
    """What to type if it is not there."""
    adapter: str | None = None
    """The module of lossscale that uses it."""


class _Row(NamedTuple):
    """What was found out about a part."""

    part: str
    version: str | None
    works: bool
    advice: str | None


# Each probe runs in a process of its own: importing TensorFlow and then Triton aborts
# the interpreter, and a broken installation must not take the doctor down with it.
_PARTS = (
    _Part("numpy", ("numpy",), "import numpy", "pip install 'lossscale[numpy]'"),
    _Part("simulate", ("numba",), "import numba", "pip install 'lossscale[simulate]'"),
    _Part(
        "plot", ("matplotlib",), "import matplotlib", "pip install 'lossscale[plot]'"
    ),
    _Part(
        "torch",
        ("torch",),
        "import torch",
        "pip install 'lossscale[torch]'",
        "lossscale.torch",
    ),
    _Part(
        "tensorflow",
        ("tensorflow", "tensorflow-cpu"),
        "import tensorflow",
        "pip install 'lossscale[tensorflow]'",
        "lossscale.tensorflow",
    ),
    _Part(
        "keras",
        ("keras",),
        "import keras",
        "pip install 'lossscale[keras]'",
        "lossscale.keras",
    ),
    _Part(
        "jax",
        ("jax",),
        "import jax; jax.devices()",
        "pip install 'lossscale[jax]'",
        "lossscale.jax",
    ),
    _Part(
        "optax",
        ("optax",),
        "import optax",
        "pip install 'lossscale[optax]'",
        "lossscale.optax",
    ),
    _Part(
        "triton kernels",
        ("triton",),
        "import sys, torch, triton\n"
        "sys.exit(None if torch.cuda.is_available() else 'no CUDA device is visible')",
        "pip install 'lossscale[triton]' on a machine with an NVIDIA GPU",
        "lossscale.torch",
    ),
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Say which frameworks and kernels work here and, if not, what to type."""
    rows = []
    with progress("examining", len(_PARTS)) as advance:
        for part in _PARTS:
            rows.append(_examine(part))
            advance()
    system = {
        "lossscale": version("lossscale"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    if as_json:
        print_json(system | {"parts": [row._asdict() for row in rows]})
        return
    for name, value in system.items():
        click.echo(f"{name} {value}")
    click.echo()
    print_table(
        ["part", "version", "works", "what to do"],
        [
            [
                row.part,
                row.version or "-",
                "yes" if row.works else "no",
                row.advice or "",
            ]
            for row in rows
        ],
    )


def _examine(part: _Part) -> _Row:
    """Return what is known about a part, after trying it."""
    found = next(filter(None, map(_version, part.packages)), None)
    if found is None:
        return _Row(part.name, None, works=False, advice=part.remedy)
    try:
        result = subprocess.run(  # noqa: S603  # our own interpreter, fixed programs
            [sys.executable, "-c", part.probe],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_TIMEOUT_SECONDS} s"
        return _Row(part.name, found, works=False, advice=f"{reason}; {part.remedy}")
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit {result.returncode}"]
        return _Row(part.name, found, works=False, advice=f"{lines[-1]}; {part.remedy}")
    if part.adapter and find_spec(part.adapter) is None:
        advice = "installed; this version of lossscale has no adapter for it yet"
        return _Row(part.name, found, works=False, advice=advice)
    return _Row(part.name, found, works=True, advice=None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
