# SPDX-License-Identifier: Apache-2.0
"""What several runs differ in: settings first, then results."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lossscale.diagnostics.report.summary import Summary
from lossscale.diagnostics.report.wording import NOTHING, number, percent


class Difference(NamedTuple):
    """One row: what differs, and what it is in each run."""

    name: str
    values: tuple[str, ...]


def _first_alarm(run: Summary) -> str:
    if not run.alarms:
        return "none"
    first = min(run.alarms, key=lambda alarm: alarm.step)
    return f"{first.kind} at step {first.step:,}"


_RESULTS = {
    "steps": lambda run: number(run.steps),
    "skipped": lambda run: f"{number(run.skipped)} ({percent(run.skipped_share)})",
    "growths": lambda run: number(run.growths),
    "back-offs": lambda run: number(run.backoffs),
    "clipped steps": lambda run: number(run.clipped),
    "lowest scale": lambda run: number(run.lowest_scale),
    "highest scale": lambda run: number(run.highest_scale),
    "last scale": lambda run: number(run.last_scale),
    "loss at the start": lambda run: number(run.first_loss),
    "loss at the end": lambda run: number(run.last_loss),
    "largest norm": lambda run: number(run.largest_norm),
    "lowest headroom, bits": lambda run: number(run.lowest_headroom),
    "first alarm": _first_alarm,
    "steps per second": lambda run: number(run.steps_per_second),
}


def find_differences(runs: Sequence[Summary]) -> list[Difference]:
    """Return what differs between runs; nothing if there is one."""
    if len(runs) < len(("this", "that")):
        return []
    rows = [
        Difference("format", tuple(run.dtype for run in runs)),
        Difference("device", tuple(run.device for run in runs)),
        *_settings("policy", [run.policy for run in runs]),
        *_settings("config", [run.config for run in runs]),
        *_settings("version", [run.versions for run in runs]),
        *(
            Difference(name, tuple(map(value, runs)))
            for name, value in _RESULTS.items()
        ),
    ]
    # A run that lacks a value does not differ in it.
    return [row for row in rows if len({*row.values} - {NOTHING}) > 1]


def _settings(what: str, mappings: Sequence[Mapping[str, Any]]) -> list[Difference]:
    names = dict.fromkeys(name for mapping in mappings for name in mapping)
    return [
        Difference(
            f"{what}: {name}",
            tuple(_shown(m.get(name)) for m in mappings),
        )
        for name in names
    ]


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return NOTHING if value is None else str(value)
    return number(value)
