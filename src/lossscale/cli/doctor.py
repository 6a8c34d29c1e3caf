# SPDX-License-Identifier: Apache-2.0
"""`lossscale doctor`: what is installed, what works, and what to type if not."""

import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, NamedTuple

import click

from lossscale.cli.choices import Choice
from lossscale.cli.output import print_json, print_notes, print_table, progress
from lossscale.cli.probe import PARTS, Answer, Part, examine

WORKS, MISSING, UNUSABLE = "works", "not installed", "not usable"
UNSUPPORTED, BROKEN = "unsupported", "broken"

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "KERAS_BACKEND",
    "PYTHONPATH",
    "TF_USE_LEGACY_KERAS",
    "TRITON_INTERPRET",
    "XLA_FLAGS",
)


class Finding(NamedTuple):
    """The result for one package."""

    part: str
    status: str
    """One of `WORKS`, `MISSING`, `UNUSABLE`, `UNSUPPORTED` and `BROKEN`."""
    version: str | None
    required: str | None
    """The versions that lossscale declares."""
    runs_on: tuple[str, ...]
    problem: str | None
    advice: str | None
    """What to type."""


@click.command()
@click.argument("parts", nargs=-1, metavar="[PART]...", type=Choice(list(PARTS)))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, parts: tuple[str, ...], as_json: bool) -> None:
    """Say which packages work here and, if not, what to type.

    Every part is imported, with the adapter that uses it, and its version is compared
    with the one that lossscale declares. Without a PART all of them are examined.

    The exit status is 1 if a part is installed and does not work or is not supported.
    """
    chosen = list(dict.fromkeys(parts)) or list(PARTS)
    ranges = _read_declared_ranges()
    findings = []
    with progress("examining", len(chosen)) as advance:
        for name in chosen:
            findings.append(_judge(PARTS[name], examine(PARTS[name]), ranges))
            advance()
    healthy = not any(x.status in {UNSUPPORTED, BROKEN} for x in findings)
    system = _system()
    if as_json:
        parts_found = [finding._asdict() for finding in findings]
        print_json(system | {"ok": healthy, "parts": parts_found})
    else:
        _print(system, findings)
    ctx.exit(0 if healthy else 1)


def _print(system: dict[str, Any], findings: list[Finding]) -> None:
    variables = system.pop("environment")
    print_notes(
        [f"{name} {value or 'without metadata'}" for name, value in system.items()]
        + [f"{name}={value}" for name, value in variables.items()]
    )
    click.echo()
    columns = ["part", "status", "version", "needs", "runs on"]
    rows = [
        [x.part, x.status, x.version or "-", x.required or "-", ", ".join(x.runs_on)]
        for x in findings
    ]
    print_table(columns, rows, text_columns=len(columns))
    notes = [
        f"{x.part}: {sentence}"
        for x in findings
        for sentence in (x.problem, x.advice)
        if sentence
    ]
    if notes:
        click.echo()
        print_notes(notes)


def _system() -> dict[str, Any]:
    try:
        release: str | None = version("lossscale")
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        release = None
    return {
        "lossscale": release,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "environment": {x: os.environ[x] for x in _VARIABLES if x in os.environ},
    }


def _read_declared_ranges() -> dict[tuple[str, str], str]:
    """Return the declared ranges, by extra and package."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in requires("lossscale") or ()]
    except PackageNotFoundError:
        return {}
    extras = {part.extra for part in PARTS.values()}
    return {
        (extra, requirement.name): str(requirement.specifier)
        for requirement in requirements
        for extra in extras
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    }


def _judge(part: Part, answer: Answer, ranges: dict[tuple[str, str], str]) -> Finding:
    """Return the result for a package after it was tried."""
    required = ranges.get((part.extra, part.name))
    install = f"pip install 'lossscale[{part.extra}]'"
    status, problem, advice = WORKS, answer.problem, None
    if answer.version is None and answer.problem is None:
        status, advice = MISSING, install
    elif not _supports(required, answer.version):
        status = UNSUPPORTED
        problem = problem or f"lossscale needs {part.name} {required}"
        advice = None if install in problem else install
    elif answer.problem is not None:
        status = BROKEN
        module = part.adapter or part.name
        advice = f"The whole error: python -I -c 'import {module}'"
    elif answer.unusable is not None:
        status, problem = UNUSABLE, answer.unusable
    facts = (answer.version, required, answer.runs_on)
    return Finding(part.name, status, *facts, problem, advice)


def _supports(required: str | None, present: str | None) -> bool:
    """Whether a version is in a range; a version that cannot be read is."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    if required is None or present is None:
        return True
    try:
        return SpecifierSet(required).contains(Version(present), prereleases=True)
    except InvalidVersion:
        return True
