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


def list_rows(backtest: Backtest, show: Show = number) -> list[list[str]]:
    """Return a row of text for the run itself and for each policy.

    Args:
        backtest: The results.
        show: Writes a number.
    """
    outcomes = {RECORDED: backtest.recorded, **backtest.outcomes}
    return [[name, *_cells(outcome, show)] for name, outcome in outcomes.items()]


def _cells(outcome: Outcome, show: Show) -> list[str]:
    fraction, headroom = NOTHING, NOTHING
    if outcome.lost is not None:
        least, most = map(percent, outcome.lost)
        fraction = least if least == most else f"{least} to {most}"
    if outcome.headroom is not None:
        headroom = f"{outcome.headroom:.1f} bits"
    return [
        _write(outcome.skipped, lambda count: f"{count:,}"),
        f"{outcome.growths:,}",
        f"{outcome.backoffs:,}",
        fraction,
        headroom,
        _write(outcome.median_scale, show),
        _write(outcome.final_scale, show),
    ]


def _write(estimate: Estimate, show: Show) -> str:
    """Return an estimate, with its bounds where they differ."""
    likely, low, high = map(show, estimate)
    return likely if low == high else f"{likely} ({low} to {high})"


def make_markdown(backtest: Backtest, title: str) -> str:
    """Return the results as Markdown, to paste into an issue."""
    lines = [f"## Backtest of {escape_line(title)}", ""]
    lines += make_table(HEADS, list_rows(backtest))
    lines += [f"- {remark}" for remark in backtest.remarks]
    return encodable("\n".join([*lines, ""]))


def make_json(backtest: Backtest, title: str) -> str:
    """Return the results as strict JSON."""
    report = {
        "format": BACKTEST_FORMAT,
        "run": title,
        "steps": backtest.steps.size,
        "dtype": backtest.dtype,
        "recorded": _as_json(backtest, backtest.recorded),
        "policies": [
            {"name": name, **_as_json(backtest, outcome)}
            for name, outcome in backtest.outcomes.items()
        ],
        "remarks": list(backtest.remarks),
    }
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _as_json(backtest: Backtest, outcome: Outcome) -> dict[str, Any]:
    indices = np.unique(np.linspace(0, backtest.steps.size - 1, _POINTS).round())
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
            "steps": backtest.steps.numbers[indices].tolist(),
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


def recommendation_as_json(
    recommendation: Recommendation, title: str
) -> dict[str, Any]:
    """Return a recommendation as strict JSON holds it."""
    return {
        "format": RECOMMENDATION_FORMAT,
        "run": title,
        "policy": settings_of(recommendation.policy),
        "reasons": list(recommendation.reasons),
        "limits": list(recommendation.limits),
        "framework": recommendation.framework,
        "code": recommendation.code,
        "skipped": {
            "recorded": None
            if recommendation.recorded is None
            else recommendation.recorded.skipped[0],
            "expected": None
            if recommendation.outcome is None
            else recommendation.outcome.skipped._asdict(),
        },
    }
