# SPDX-License-Identifier: Apache-2.0
"""The report as Markdown, to paste into an issue.

Whatever comes from a run is escaped: it stays text, and stays in its line. In a
terminal, it is not obeyed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from lossscale.core.policies import Dynamic, Fixed
from lossscale.diagnostics.alarms import Alarm
from lossscale.diagnostics.records.layout import describe_policy
from lossscale.diagnostics.report.differences import find_differences
from lossscale.diagnostics.report.summary import Summary
from lossscale.diagnostics.report.updates import HEADS, cells, describe
from lossscale.diagnostics.report.wording import (
    NOTHING,
    SPACE,
    duration,
    encodable,
    number,
    percent,
)

_MOST_TENSORS = 20
_MOST_ALARMS = 20
_LONGEST = 200
_LONGEST_ADVICE = 600


def make_markdown(summaries: Sequence[Summary]) -> str:
    """Return the report of some runs."""
    lines: list[str] = []
    for run in summaries:
        lines += _run(run)
    if len(summaries) > 1:
        lines += ["## What differs", "", *_differences(summaries), ""]
    return encodable("\n".join(lines))


def _run(run: Summary) -> Iterator[str]:
    yield from (f"## {escape_line(run.title)}", "")
    yield from make_table(["", ""], _facts(run))
    if run.alarms:
        yield from ("### Alarms", "")
        yield from map(_alarm, run.alarms[:_MOST_ALARMS])
        yield ""
    if run.advice:
        yield from ("### What to try", "")
        yield from (f"- {escape_line(text, _LONGEST_ADVICE)}" for text in run.advice)
        yield ""
    if run.updates is not None:
        yield from ("### Updates of the weights", "", describe(run.updates), "")
        yield from make_table(HEADS, cells(run.updates))
    if run.tensors:
        yield from ("### Tensors that were not finite", "")
        yield from _tensors(run)


def _facts(run: Summary) -> list[list[str]]:
    causes = ", ".join(
        f"{number(count)} {cause}" for cause, count in run.causes.items()
    )
    skipped = f"{number(run.skipped)} ({percent(run.skipped_share)})"
    scale = (
        f"{number(run.first_scale)} to {number(run.last_scale)}, between "
        f"{number(run.lowest_scale)} and {number(run.highest_scale)}"
    )
    low = run.lowest_headroom
    facts = [
        ["steps", f"{number(run.steps)} in {duration(run.seconds)}"],
        ["skipped", f"{skipped}: {causes}" if causes else skipped],
        ["scale", scale],
        ["growths, back-offs", f"{number(run.growths)}, {number(run.backoffs)}"],
        ["loss", f"{number(run.first_loss)} to {number(run.last_loss)}"]
        if run.last_loss is not None
        else [],
        ["largest norm", number(run.largest_norm)]
        if run.largest_norm is not None
        else [],
        ["lowest headroom", f"{low:.1f} bits"] if low is not None else [],
        ["format, device", f"{run.dtype}, {run.device}"],
        ["policy", _policy(run.policy)],
        ["versions", _settings(run.versions)],
    ]
    return [fact for fact in facts if fact]  # what was not recorded is left out


def _policy(values: Mapping[str, object]) -> str:
    """Return the kind of a policy, and what differs from its defaults."""
    kind = values.get("kind")
    usual = _USUAL.get(str(kind), {})
    differs = {
        name: value
        for name, value in values.items()
        if name != "kind" and (name not in usual or usual[name] != value)
    }
    shown = [NOTHING if kind is None else str(kind)]
    shown += [f"{name} {_plain(v)}" for name, v in differs.items() if v is not None]
    return ", ".join(shown if kind is not None or len(shown) == 1 else shown[1:])


_USUAL = {
    policy["kind"]: policy
    for policy in map(describe_policy, (Dynamic(), Fixed()))
    if policy is not None
}
"""The settings that a policy has unless it is given others, by its kind."""


def _plain(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return str(value)


def _settings(values: Mapping[str, object]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items() if v is not None) or NOTHING


def _alarm(alarm: Alarm) -> str:
    good = "unknown" if alarm.last_good_step is None else f"{alarm.last_good_step:,}"
    kind, message = escape_line(alarm.kind), escape_line(alarm.message)
    return (
        f"- step {alarm.step:,}, **{kind}**: {message} "
        f"Last step with good weights: {good}."
    )


def _tensors(run: Summary) -> Iterator[str]:
    rows = [
        [
            tensor.name,
            *map(number, (tensor.inf, tensor.nan, tensor.headroom)),
            *(f"{step:,}" for step in (tensor.first, tensor.last)),
        ]
        for tensor in run.tensors[:_MOST_TENSORS]
    ]
    yield from make_table(["tensor", "inf", "NaN", "too large", "first", "last"], rows)
    more = len(run.tensors) - len(rows)
    if more > 0:
        yield from (f"{more:,} more.", "")


def _differences(summaries: Sequence[Summary]) -> Iterator[str]:
    rows = [[row.name, *row.values] for row in find_differences(summaries)]
    yield from make_table(["", *(run.title for run in summaries)], rows)


def make_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield _row(heads)
    yield _row(["---"] * len(heads))
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    shown = (cell if cell == "---" else escape_line(cell) for cell in cells)
    return f"| {' | '.join(shown)} |"


def escape_line(text: str, longest: int = _LONGEST) -> str:
    """Return text that Markdown shows as it is, in one line."""
    line = _BREAKS.sub(" ", text).strip()
    if len(line) > longest:
        line = f"{line[:longest]}..."
    return (
        _SPECIAL.sub(r"\\\g<0>", printable(line))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
    )


def printable(text: str) -> str:
    """Return text without what a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter == SPACE else "?" for letter in text
    )


_BREAKS = re.compile(r"[^\S\u00a0]+")
"""White space but the no-break space, which holds a number and its unit together."""

_SPECIAL = re.compile(r"[\\`*\[\]|#~$@]|(?<!\w)_|_(?!\w)")
"""What has a meaning in Markdown; `_` has none inside a word."""
