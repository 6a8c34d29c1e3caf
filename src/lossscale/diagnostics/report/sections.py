# SPDX-License-Identifier: Apache-2.0
"""The parts of the page that are text: readable without the script.

Every function returns HTML in which whatever comes from a run is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from lossscale.diagnostics.report.differences import Difference
from lossscale.diagnostics.report.summary import Summary
from lossscale.diagnostics.report.updates import HEADS, cells, describe
from lossscale.diagnostics.report.wording import NOTHING, duration, number, percent

_MOST_TENSORS = 100
"""How many tensors the table of those that were not finite has, for each run."""

_LONGEST_ADVICE = 600
_LONGEST = 300
"""How many characters of a text that comes from a run are shown."""


def title(runs: Sequence[Summary]) -> str:
    """Return the title of the page."""
    if len(runs) == 1:
        return runs[0].title[:_LONGEST]
    return f"{len(runs)} runs compared"


def lede(runs: Sequence[Summary]) -> str:
    """Return what happened, in two sentences."""
    if len(runs) > 1:
        alarmed = sum(bool(run.alarms) for run in runs)
        raised = f"{_count(alarmed, 'run')} of {len(runs)}" if alarmed else "No run"
        steps, skipped = sum(r.steps for r in runs), sum(r.skipped for r in runs)
        return escape_text(
            f"{_count(steps, 'step')} in all, {number(skipped)} of them skipped. "
            f"{raised} raised an alarm."
        )
    (run,) = runs
    if not run.steps:
        return "No step was recorded."
    share = f" ({percent(run.skipped_share)})" if run.skipped else ""
    scale = (
        f"The scale went from {number(run.first_scale)} to {number(run.last_scale)}"
        if run.first_scale != run.last_scale
        else f"The scale was {number(run.last_scale)} at both ends"
    )
    were = "was" if len(run.alarms) == 1 else "were"
    alarm = (
        f"{_count(len(run.alarms), 'alarm')} {were} raised"
        if run.alarms
        else "no alarm was raised"
    )
    return escape_text(
        f"{_count(run.steps, 'step')}, {number(run.skipped)} of them skipped{share}. "
        f"{scale}, and {alarm}."
    )


def overview(runs: Sequence[Summary]) -> str:
    """Return the most important numbers: large for one run, as a table for several."""
    return _tiles(runs[0]) if len(runs) == 1 else _comparison(runs)


def _tiles(run: Summary) -> str:
    causes = ", ".join(f"{number(n)} {cause}" for cause, n in run.causes.items())
    state = "ended" if run.ended else "not closed: it goes on, or was killed"
    resumed = f", resumed {_count(run.resumed, 'time')}" if run.resumed else ""
    speed = (
        f"{number(run.steps_per_second)} a second, "
        if run.steps_per_second is not None
        else ""
    )
    tiles = [
        (
            "Steps",
            number(run.steps),
            f"{speed}{duration(run.seconds)}; {state}{resumed}",
        ),
        ("Skipped", number(run.skipped), causes or "every step was applied"),
        (
            "Scale at the end",
            number(run.last_scale),
            (
                f"{number(run.lowest_scale)} to {number(run.highest_scale)}; "
                f"{_count(run.growths, 'growth')}, {_count(run.backoffs, 'back-off')}"
            ),
        ),
    ]
    if run.last_loss is not None:
        first = f"{number(run.first_loss)} at first"
        tiles.append(("Loss at the end", number(run.last_loss), first))
    if run.lowest_headroom is not None:
        bits = _bits(run.lowest_headroom)
        tiles.append(("Lowest headroom", bits, f"of {run.dtype}"))
    entries = "".join(
        f'<div><dt>{escape_text(name)}</dt><dd>{escape_text(value)}<span class="extra">'
        f"{escape_text(extra)}</span></dd></div>"
        for name, value, extra in tiles
    )
    return f'<dl class="tiles">{entries}</dl>'


def _comparison(runs: Sequence[Summary]) -> str:
    rows = [
        [
            f"{line_key(index)} {escape_text(run.title)}",
            number(run.steps),
            f"{number(run.skipped)}",
            number(run.last_scale),
            number(run.last_loss),
            _bits(run.lowest_headroom),
            number(len(run.alarms)),
        ]
        for index, run in enumerate(runs)
    ]
    heads = ["run", "steps", "skipped", "scale at the end", "loss at the end"]
    heads += ["lowest headroom", "alarms"]
    # A column in which no run has anything is left out.
    kept = [i for i in range(len(heads)) if any(row[i] != NOTHING for row in rows)]
    rows = [[row[i] for i in kept] for row in rows]
    heads = [heads[i] for i in kept]
    return make_table(heads, rows, whole=True, escaped_first=True)


def alarms(runs: Sequence[Summary]) -> str:
    """Return the alarms of all runs."""
    parts = []
    for run in runs:
        if run.alarms:
            parts += [_run_heading(runs, run), _alarm_list(run)]
    if not parts:
        return '<p class="good">None.</p>'
    return "".join(parts)


def _alarm_list(run: Summary) -> str:
    items = []
    for alarm in run.alarms[:_MOST_TENSORS]:
        good = (
            "No step is known to have had good weights."
            if alarm.last_good_step is None
            else f"Last step with good weights: {alarm.last_good_step:,}."
        )
        items.append(
            f'<li><p><span class="kind">{escape_text(alarm.kind)}</span> at step '
            f"{alarm.step:,}</p><p>{escape_text(alarm.message)}</p>"
            f'<p class="sub">{escape_text(good)}</p></li>'
        )
    more = len(run.alarms) - len(items)
    rest = f"<li>{_count(more, 'alarm')} more.</li>" if more > 0 else ""
    return f'<ul class="alarms">{"".join(items)}{rest}</ul>'


def advice(runs: Sequence[Summary]) -> str:
    """Return what to try, for each run."""
    parts = []
    for run in runs:
        items = "".join(
            f"<li>{escape_text(text, _LONGEST_ADVICE)}</li>" for text in run.advice
        )
        parts += [_run_heading(runs, run), f'<ul class="advice">{items}</ul>']
    return "".join(parts)


def run_toggles(runs: Sequence[Summary]) -> str:
    """Return the boxes that show and hide runs, if there are several."""
    if len(runs) == 1:
        return ""
    items = "".join(
        f'<li><label><input type="checkbox" class="toggle-run" value="{index}" checked>'
        f"{line_key(index)} {escape_text(run.title)}</label></li>"
        for index, run in enumerate(runs)
    )
    return f'<ul class="runs" aria-label="Runs that are drawn">{items}</ul>'


def run_chooser(runs: Sequence[Summary], chosen: int) -> str:
    """Return the list from which a run's tensors are chosen, if there are several."""
    if len(runs) == 1:
        return ""
    options = "".join(
        f'<option value="{index}"{" selected" if index == chosen else ""}>'
        f"{escape_text(run.title)}</option>"
        for index, run in enumerate(runs)
    )
    return (
        '<div class="controls"><label>Run<select id="run">'
        f"{options}</select></label></div>"
    )


def nonfinite(runs: Sequence[Summary]) -> str:
    """Return the tables of the tensors that kept steps from being applied."""
    parts = []
    for run in runs:
        if not run.tensors:
            continue
        rows = [
            [
                tensor.name,
                number(tensor.inf),
                number(tensor.nan),
                number(tensor.headroom),
                f"{tensor.first:,}",
                f"{tensor.last:,}",
            ]
            for tensor in run.tensors[:_MOST_TENSORS]
        ]
        heads = ["tensor", "inf", "NaN", "too large", "first step", "last step"]
        more = len(run.tensors) - len(rows)
        note = f'<p class="sub">{_count(more, "tensor")} more.</p>' if more > 0 else ""
        parts += [_run_heading(runs, run), make_table(heads, rows, names=True), note]
    if parts:
        return "".join(parts)
    skipped = any(run.skipped for run in runs)
    text = (
        "Steps were skipped, and the names of the tensors were not recorded."
        if skipped
        else "None."
    )
    return f'<p class="good">{text}</p>'


def updates(runs: Sequence[Summary]) -> str:
    """Return the section on the updates of the weights, if any were measured."""
    parts = []
    for run in runs:
        if run.updates is not None:
            sentence = f'<p class="sub">{escape(describe(run.updates))}</p>'
            table = make_table(HEADS, cells(run.updates), names=True)
            parts += [_run_heading(runs, run), sentence, table]
    if not parts:
        return ""
    return (
        '<section id="updates" aria-labelledby="updates-title">'
        f'<h2 id="updates-title">Updates of the weights</h2>{"".join(parts)}</section>'
    )


def differences(runs: Sequence[Summary], rows: Sequence[Difference]) -> str:
    """Return the section on what differs, if there are several runs."""
    if len(runs) == 1:
        return ""
    heads = ["", *(run.title for run in runs)]
    cells = [[row.name, *row.values] for row in rows]
    body = make_table(heads, cells, whole=True) if cells else "<p>Nothing.</p>"
    return (
        '<section id="differences" aria-labelledby="differences-title">'
        f'<h2 id="differences-title">What differs</h2>{body}</section>'
    )


def about(runs: Sequence[Summary]) -> str:
    """Return what the runs were recorded with."""
    parts = []
    for run in runs:
        facts = [("format", run.dtype), ("device", run.device)]
        facts += [("policy", _settings(run.policy))] if run.policy else []
        facts += [("config", _settings(run.config))] if run.config else []
        facts += [("versions", _settings(run.versions))] if run.versions else []
        if run.unreadable_lines:
            facts.append(("lines left out", number(run.unreadable_lines)))
        rows = "".join(
            f"<dt>{escape_text(n)}</dt><dd>{escape_text(v)}</dd>" for n, v in facts
        )
        parts += [_run_heading(runs, run), f'<dl class="facts">{rows}</dl>']
    return "".join(parts)


def _settings(values: Mapping[str, object]) -> str:
    known = {key: value for key, value in values.items() if value is not None}
    return ", ".join(f"{key} {_plain(value)}" for key, value in known.items())


def _plain(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return str(value)


def _run_heading(runs: Sequence[Summary], run: Summary) -> str:
    return f"<h3>{escape_text(run.title)}</h3>" if len(runs) > 1 else ""


def line_key(index: int) -> str:
    """Return where the script draws how the line of a run looks."""
    return f'<span class="line-key" data-run="{index}"></span>'


def make_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    whole: bool = False,
    names: bool = False,
    escaped_first: bool = False,
) -> str:
    """Return a table; its first column is the head of each row."""
    head = "".join(f'<th scope="col">{escape_text(text)}</th>' for text in heads)
    kind = ' class="name"' if names else ' class="wrap"'
    body = []
    for first, *others in rows:
        cells = "".join(f"<td>{escape_text(text)}</td>" for text in others)
        start = first if escaped_first else escape_text(first)
        body.append(f'<tr><th scope="row"{kind}>{start}</th>{cells}</tr>')
    return (
        f'<div class="table{" whole" if whole else ""}"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def escape_text(text: str, longest: int = _LONGEST) -> str:
    """Return text as HTML shows it, shortened if it is very long."""
    shown = text if len(text) <= longest else f"{text[:longest]}…"
    return escape(shown)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _bits(headroom: float | None) -> str:
    return NOTHING if headroom is None else f"{headroom:.1f} bits"
