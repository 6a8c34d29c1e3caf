# SPDX-License-Identifier: Apache-2.0
"""The results of a backtest as a table, as Markdown and as JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from lossscale.core.portable import KINDS
from lossscale.diagnostics.backtests.backtest import Backtest
from lossscale.diagnostics.backtests.code import write_policy
from lossscale.diagnostics.backtests.outcome import Estimate, Outcome
from lossscale.diagnostics.backtests.recommendation import Recommendation
from lossscale.diagnostics.report.markdown import escape_line, make_table
from lossscale.diagnostics.report.wording import NOTHING, encodable, number, percent

BACKTEST_FORMAT = "lossscale-backtest/1"
"""The format of `lossscale backtest --format json`."""

RECOMMENDATION_FORMAT = "lossscale-recommendation/1"
"""The format of `lossscale recommend --format json`."""

RECORDED = "as recorded"
"""What the row of the run itself is called."""

HEADS = (
    "policy",
    "skipped",
    "growths",
    "back-offs",
    "lost values",
    "headroom",
    "median scale",
    "final scale",
)

_POINTS = 200
"""At how many steps the JSON has the scale."""

Show = Callable[[float], str]


def list_rows(found: Backtest, show: Show = number) -> list[list[str]]:
    """Return a row of text for the run itself and for each policy.

    Args:
        found: The results.
        show: Writes a number.
    """
    outcomes = {RECORDED: found.recorded, **found.outcomes}
    return [[name, *_cells(outcome, show)] for name, outcome in outcomes.items()]


def _cells(outcome: Outcome, show: Show) -> list[str]:
    lost, headroom = NOTHING, NOTHING
    if outcome.lost is not None:
        known, most = map(percent, outcome.lost)
        lost = known if known == most else f"{known} to {most}"
    if outcome.headroom is not None:
        headroom = f"{outcome.headroom:.1f} bits"
    return [
        _write(outcome.skipped, lambda count: f"{count:,}"),
        f"{outcome.growths:,}",
        f"{outcome.backoffs:,}",
        lost,
        headroom,
        _write(outcome.median_scale, show),
        _write(outcome.final_scale, show),
    ]


def _write(estimate: Estimate, show: Show) -> str:
    """Return an estimate, with its bounds where they differ."""
    likely, low, high = map(show, estimate)
    return likely if low == high else f"{likely} ({low} to {high})"


def make_markdown(found: Backtest, title: str) -> str:
    """Return the results as Markdown, to paste into an issue."""
    lines = [f"## Backtest of {escape_line(title)}", ""]
    lines += make_table(HEADS, list_rows(found))
    lines += [f"- {remark}" for remark in found.remarks]
    return encodable("\n".join([*lines, ""]))


def make_json(found: Backtest, title: str) -> str:
    """Return the results as strict JSON."""
    report = {
        "format": BACKTEST_FORMAT,
        "run": title,
        "steps": found.steps.size,
        "dtype": found.dtype,
        "recorded": _as_json(found, found.recorded),
        "policies": [
            {"name": name, **_as_json(found, outcome)}
            for name, outcome in found.outcomes.items()
        ],
        "remarks": list(found.remarks),
    }
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _as_json(found: Backtest, outcome: Outcome) -> dict[str, Any]:
    indices = np.unique(np.linspace(0, found.steps.size - 1, _POINTS).round())
    indices = indices.astype(np.int64)
    return {
        "policy": settings_of(outcome.policy),
        "skipped": outcome.skipped._asdict(),
        "growths": outcome.growths,
        "backoffs": outcome.backoffs,
        "lost": None if outcome.lost is None else outcome.lost._asdict(),
        "headroom_bits": outcome.headroom,
        "median_scale": outcome.median_scale._asdict(),
        "final_scale": outcome.final_scale._asdict(),
        "trajectory": {
            "steps": found.steps.numbers[indices].tolist(),
            "scales": outcome.scales[indices].tolist(),
        },
    }


def settings_of(policy: Any) -> Any:
    """Return the settings of a policy, as a portable state has them."""
    if policy is None:
        return None
    for kind, policy_class in KINDS.items():
        if type(policy) is policy_class and is_dataclass(policy):
            return {"kind": kind, **asdict(policy)}
    return {"kind": write_policy(policy)}


def recommendation_as_json(found: Recommendation, title: str) -> dict[str, Any]:
    """Return a recommendation as strict JSON holds it."""
    return {
        "format": RECOMMENDATION_FORMAT,
        "run": title,
        "policy": settings_of(found.policy),
        "reasons": list(found.reasons),
        "limits": list(found.limits),
        "framework": found.framework,
        "code": found.code,
        "skipped": {
            "recorded": None if found.recorded is None else found.recorded.skipped[0],
            "expected": None
            if found.outcome is None
            else found.outcome.skipped._asdict(),
        },
    }
