# SPDX-License-Identifier: Apache-2.0
"""A run that is going on, as a few lines of text.

What `lossscale watch` shows, in a terminal and with `--once`. Imports the standard
library only.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from lossscale.diagnostics.formats import headroom
from lossscale.diagnostics.records.follower import RunFollower
from lossscale.diagnostics.records.steps import StepRecord
from lossscale.diagnostics.report.markdown import printable
from lossscale.diagnostics.report.wording import SPACE, number, percent

_BARS = "▁▂▃▄▅▆▇█"
_LABEL = 10
_VALUE = 12
_LEAST_WIDTH = 40
_MOST_NAMES = 4
_MOST_ALARMS = 3


def render_run(run: RunFollower, width: int = 80) -> list[str]:
    """Return what there is to see in a run, in lines of at most so many characters."""
    width = max(_LEAST_WIDTH, width)
    recent = list(run.recent)
    bars = width - _LABEL - _VALUE
    lines = [_clip(f"{run.title}  {_state(run)}", width), ""]
    if not recent:
        return [*lines, "No step was recorded yet."]
    lines += [
        _curve(name, recent, read, choose, bars)
        for name, read, choose in _CURVES
        if any(read(record) is not None for record in recent)
    ]
    dtype = str(run.header["dtype"])
    # The last one that is known: a CPU may measure it on some steps only.
    measured = (headroom_of(record, dtype) for record in reversed(recent))
    left = next((bits for bits in measured if bits is not None), None)
    if left is not None:
        lines.append(f"{'headroom':<{_LABEL}}{left:.1f} bits")
    lines.append("")
    lines += [_clip(line, width) for line in _skips(run)]
    return [*lines, "", *_alarms(run, width)]


def headroom_of(record: StepRecord, dtype: str) -> float | None:
    """Return the headroom of a step, if its largest magnitude was recorded."""
    if record.amax is None:
        return None
    return headroom(record.amax, record.scale, dtype)


def sparkline(
    values: Sequence[float | None],
    width: int,
    choose: Callable[[Iterable[float]], float] = max,
) -> str:
    """Return values as bars, each the extreme of the values that it represents.

    Example:
        >>> from lossscale.diagnostics.live import sparkline
        >>> sparkline([1.0, 1.0, 8.0, None, 4.0], 5)
        '▁▁█ ▄'
    """
    count = min(width, len(values))
    extremes: list[float | None] = []
    for i in range(count):
        window = values[i * len(values) // count : (i + 1) * len(values) // count]
        finite = [v for v in window if v is not None and math.isfinite(v)]
        extremes.append(choose(finite) if finite else None)
    finite_extremes = [value for value in extremes if value is not None]
    low, high = min(finite_extremes, default=0.0), max(finite_extremes, default=0.0)
    span = (high - low) or 1.0
    highest = len(_BARS) - 1
    return "".join(
        " " if value is None else _BARS[round((value - low) / span * highest)]
        for value in extremes
    )


def _curve(
    name: str,
    recent: Sequence[StepRecord],
    read: Callable[[StepRecord], float | None],
    choose: Callable[[Iterable[float]], float],
    width: int,
) -> str:
    values = [read(record) for record in recent]
    text = number(values[-1])
    if name == "scale":
        values = [None if value is None else math.log2(value) for value in values]
    line = f"{name:<{_LABEL}}{text:<{_VALUE}}{sparkline(values, width, choose)}"
    return line.rstrip()


_CURVES: tuple[
    tuple[
        str,
        Callable[[StepRecord], float | None],
        Callable[[Iterable[float]], float],
    ],
    ...,
] = (
    ("scale", lambda record: record.scale, min),
    ("loss", lambda record: record.loss, max),
    ("norm", lambda record: record.norm, max),
)


def _state(run: RunFollower) -> str:
    last = run.recent[-1] if run.recent else None
    step = "no step" if last is None else f"step {last.step:,}"
    speed = _speed(list(run.recent))
    if run.ended:
        state = "ended"
    elif run.is_live:
        state = "running"
    else:
        state = _last_written(run.seconds_since_written)
    return ", ".join(filter(None, (step, speed, state)))


def _speed(recent: Sequence[StepRecord]) -> str:
    last = recent[-200:]
    seconds = last[-1].time - last[0].time if len(last) > 1 else 0.0
    return f"{(len(last) - 1) / seconds:.3g} steps/s" if seconds > 0 else ""


def _last_written(ago: float | None) -> str:
    if ago is None:
        return "its file is gone"
    seconds = round(ago)
    minutes = seconds // 60
    since = f"{seconds} s" if minutes < 1 else f"{minutes:,} min"
    return f"last written {since} ago, not closed"


def _skips(run: RunFollower) -> list[str]:
    if not run.skipped:
        return [f"skipped   none of {run.steps:,} steps"]
    causes = ", ".join(
        f"{count:,} {cause}" for cause, count in run.causes.most_common()
    )
    fraction = percent(run.skipped / max(1, run.steps))
    lines = [f"skipped   {run.skipped:,} of {run.steps:,} steps ({fraction}): {causes}"]
    last = run.last_skip
    if last is not None:
        names = [f"{name} ({cause})" for name, cause in last.nonfinite]
        more = len(names) - _MOST_NAMES
        suffix = f" and {more:,} more" if more > 0 else ""
        details = f" in {', '.join(names[:_MOST_NAMES])}{suffix}" if names else ""
        lines.append(f"          last at step {last.step:,}: {last.cause}{details}")
        if last.nearest_finite is not None:
            lines.append(f"          nearest that was finite: {last.nearest_finite}")
    return lines


def _alarms(run: RunFollower, width: int) -> list[str]:
    if not run.alarms:
        return ["alarms    none"]
    lines = [f"alarms    {len(run.alarms):,}"]
    for alarm in list(run.alarms)[-_MOST_ALARMS:]:
        good = alarm.get("last_good_step")
        end = "" if good is None else f" Last step with good weights: {_whole(good)}."
        kind, message = alarm.get("kind"), alarm.get("message")
        text = f"step {_whole(alarm.get('step'))}, {kind}: {message}{end}"
        lines += _wrap(_in_terminal(text), width)
    return lines


def _whole(value: object) -> str:
    """Return what a file calls a step, with commas if it is one."""
    return f"{value:,}" if type(value) is int else str(value)


def _wrap(text: str, width: int) -> list[str]:
    lines, line = [], "         "
    for word in text.split():
        if len(line) + 1 + len(word) > width and line.strip():
            lines.append(line)
            line = "         "
        line = f"{line} {word}"[:width]
    return [*lines, line]


def _clip(text: str, width: int) -> str:
    line = _in_terminal(text)
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _in_terminal(text: str) -> str:
    """Return text with plain spaces, and without what a terminal would obey."""
    return printable(text.replace(SPACE, " "))
