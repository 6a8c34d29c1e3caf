# SPDX-License-Identifier: Apache-2.0
"""What a report says about a run, in numbers: the page, Markdown and JSON share it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

from lossscale.diagnostics.alarms import KINDS, Alarm, scan
from lossscale.diagnostics.records.blocks import Block, Overflows, add_overflows
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.records.steps import CAUSES, StepRecord
from lossscale.diagnostics.report.advice import give_advice
from lossscale.diagnostics.report.updates import Updates, summarize_updates

REPORT_FORMAT = "lossscale-report/1"
"""The format of `lossscale report --format json`."""

_ENDS = 20
"""How many steps the loss of the start and of the end is averaged over."""

_MOST_SCANNED = 200_000
"""How many steps are searched for alarms, where the run has none written in it."""


class Bracket(NamedTuple):
    """The two tensors between which a gradient broke."""

    step: int
    broken: str
    """The first that was not finite in the backward pass."""
    nearest_finite: str
    """The one that was computed before it."""


@dataclass(frozen=True)
class Summary:
    """One run."""

    title: str
    first_step: int | None
    last_step: int | None
    steps: int
    applied: int
    skipped: int
    causes: dict[str, int]
    growths: int
    backoffs: int
    clipped: int
    first_scale: float | None
    last_scale: float | None
    lowest_scale: float | None
    highest_scale: float | None
    first_loss: float | None
    """The mean loss of the first steps."""
    last_loss: float | None
    """The mean loss of the last steps; NaN if none of them was finite."""
    largest_norm: float | None
    lowest_headroom: float | None
    """In bits; negative if finite gradients were beyond the format's largest number."""
    largest_magnitude: float | None
    """Of the unscaled gradients."""
    lost_share: float | None
    """The share of numbers that were zero or subnormal when they were last measured."""
    seconds: float
    steps_per_second: float | None
    resumed: int
    """How often the run was resumed."""
    ended: bool
    """Whether the run was closed; otherwise it goes on, or was killed."""
    unreadable_lines: int
    alarms: tuple[Alarm, ...]
    tensors: tuple[Overflows, ...]
    """The tensors that were not finite, the most frequent first."""
    bracket: Bracket | None
    """Where gradients broke, before the first alarm or else for the first time."""
    dtype: str
    device: str
    policy: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
    updates: Updates | None = None
    """What the last measured step added to the weights."""
    advice: tuple[str, ...] = ()

    @property
    def skipped_share(self) -> float:
        """The share of steps that were skipped."""
        return self.skipped / self.steps if self.steps else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the summary as strict JSON holds it."""
        values = asdict(self)
        values["bracket"] = None if self.bracket is None else self.bracket._asdict()
        values["alarms"] = [alarm._asdict() for alarm in self.alarms]
        values["tensors"] = [tensor._asdict() for tensor in self.tensors]
        values["updates"] = None if self.updates is None else self.updates.as_json()
        return {key: _finite_or_none(value) for key, value in values.items()}


def _finite_or_none(value: Any) -> Any:
    """Return a value with `None` for what strict JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite_or_none(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_none(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarize_run(run: RunFile) -> Summary:
    """Return what a report says about a run."""
    blocks = run.blocks
    seconds = sum(max(0.0, block.end - block.start) for block in blocks)
    steps = run.rows
    alarms = find_alarms(run)
    skipped = steps - sum(block.applied for block in blocks)
    values: dict[str, Any] = {
        "title": run.title,
        "first_step": blocks[0].first if blocks else None,
        "last_step": run.last_step,
        "steps": steps,
        "applied": steps - skipped,
        "skipped": skipped,
        "causes": _sum_causes(blocks),
        "growths": sum(block.growths for block in blocks),
        "backoffs": sum(block.backoffs for block in blocks),
        "clipped": sum(block.clipped for block in blocks),
        "first_scale": blocks[0].first_scale if blocks else None,
        "last_scale": blocks[-1].last_scale if blocks else None,
        "lowest_scale": _extreme(blocks, "scale", "low", min),
        "highest_scale": _extreme(blocks, "scale", "high", max),
        "first_loss": _mean_loss(run, start=True),
        "last_loss": _mean_loss(run, start=False),
        "largest_norm": _extreme(blocks, "norm", "high", max),
        "lowest_headroom": _extreme(blocks, "headroom", "low", min),
        "largest_magnitude": _extreme(blocks, "amax", "high", max),
        "lost_share": _last_lost_share(run),
        "seconds": seconds,
        "steps_per_second": (steps - len(blocks)) / seconds if seconds > 0 else None,
        "resumed": len(run.events_of("resumed")),
        "ended": _has_ended(run),
        "unreadable_lines": run.malformed.lines,
        "alarms": alarms,
        "tensors": _sum_overflows(blocks),
        "bracket": _find_bracket(run, alarms),
        "dtype": run.dtype,
        "device": run.device,
        "policy": _mapping(run.header.get("policy")),
        "versions": {
            k: str(v) for k, v in _mapping(run.header.get("versions")).items()
        },
        "config": _mapping(run.header.get("config")),
        "updates": summarize_updates(run),
    }
    summary = Summary(**values)
    return Summary(**values, advice=tuple(give_advice(summary)))


def find_alarms(run: RunFile) -> tuple[Alarm, ...]:
    """Return the alarms in a run's file; if a short run has none, look for them."""
    written = tuple(filter(None, map(_read_alarm, run.events_of("alarm"))))
    if written or run.rows > _MOST_SCANNED:
        return written
    policy = _mapping(run.header.get("policy"))
    return tuple(scan(run.records(), policy=policy, dtype=run.dtype))


def _read_alarm(value: Any) -> Alarm | None:
    """Return an alarm that a run's file holds, if it is one."""
    fields = value if isinstance(value, dict) else {}
    kind, step, message = (fields.get(name) for name in ("kind", "step", "message"))
    good, names = fields.get("last_good_step"), fields.get("names", [])
    usable = (
        kind in KINDS
        and type(step) is int
        and isinstance(message, str)
        and (good is None or type(good) is int)
        and isinstance(names, list)
    )
    if not usable:
        return None
    return Alarm(str(kind), int(step or 0), good, str(message), tuple(map(str, names)))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _has_ended(run: RunFile) -> bool:
    """Whether the last thing that the file says is that the run was closed."""
    ends = [event for event in run.events if "closed" in event or "resumed" in event]
    return bool(ends) and "closed" in ends[-1]


def _sum_causes(blocks: Sequence[Block]) -> dict[str, int]:
    counts = {c: sum(block.causes.get(c, 0) for block in blocks) for c in CAUSES}
    return {cause: count for cause, count in counts.items() if count}


def _extreme(blocks: Sequence[Block], name: str, end: str, choose: Any) -> float | None:
    values = [
        getattr(block.series[name], end)
        for block in blocks
        if name in block.series and block.series[name].finite
    ]
    return choose(values) if values else None


def _sum_overflows(blocks: Sequence[Block]) -> tuple[Overflows, ...]:
    found: dict[str, Overflows] = {}
    for block in blocks:
        for one in block.tensors:
            known = found.get(one.name)
            found[one.name] = one if known is None else add_overflows(known, one)
    return tuple(sorted(found.values(), key=lambda t: (-t.inf - t.nan, t.first)))


def _mean_loss(run: RunFile, *, start: bool) -> float | None:
    """Return the mean loss at one end of the run, over those that are finite."""
    first, last = (run.blocks[0].first, run.last_step) if run.blocks else (0, -1)
    assert last is not None  # noqa: S101  # for mypy
    bounds = (first, first + _ENDS - 1) if start else (last - _ENDS + 1, last)
    losses = [record.loss for record in run.records(*bounds)]
    known = [loss for loss in losses if loss is not None]
    finite = [loss for loss in known if math.isfinite(loss)]
    if known and not finite:
        return math.nan
    return fmean(finite) if finite else None


def _find_bracket(run: RunFile, alarms: Sequence[Alarm]) -> Bracket | None:
    """Return where gradients broke: what led to the first alarm, or the first time."""
    if alarms and alarms[0].last_good_step is not None:
        last = alarms[0].step
        start = max(alarms[0].last_good_step, last - _LONGEST_SPAN)
        found = _first_bracket(run.records(start, last))
        if found is not None:
            return found
    # A block is read once, however many tensors broke in it: decoding it costs as much
    # for one step as for all of them.
    broken = [block for block in run.blocks if block.tensors]
    for block in broken[:_MOST_BLOCKS]:
        found = _first_bracket(run.records(block.first, block.last))
        if found is not None:
            return found
    return None


_LONGEST_SPAN = 4_096
"""How many steps before the first alarm are searched for the layer that broke."""

_MOST_BLOCKS = 16
"""How many blocks with non-finite tensors are searched for it."""


def _first_bracket(records: Iterable[StepRecord]) -> Bracket | None:
    return next(filter(None, map(_bracket_of, records)), None)


def _bracket_of(record: StepRecord) -> Bracket | None:
    if record.nearest_finite is None or not record.nonfinite:
        return None
    # They are in the model's order, which the backward pass goes through in reverse.
    return Bracket(record.step, record.nonfinite[-1][0], record.nearest_finite)


def _last_lost_share(run: RunFile) -> float | None:
    """Return the share of zeros and subnormals in the last statistics of a run."""
    if not run.tensor_blocks:
        return None
    start = run.tensor_blocks[-1].offset
    samples = list(run.statistics(start, run.end - start))
    if not samples:
        return None
    rows = samples[-1].tensors
    total = sum(size for _, size, *_ in rows)
    lost = sum(size * (zeros + small) for _, size, _, zeros, small, *_ in rows)
    return lost / total if total else None
