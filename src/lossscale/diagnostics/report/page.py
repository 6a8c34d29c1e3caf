# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file that opens from the disk and loads nothing.

A content security policy allows the one script and the one style sheet by their hashes,
and nothing else. Whatever comes from a run is escaped, or reaches the page as data that
the script writes as text.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from string import Template
from typing import Any

from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.report import sections
from lossscale.diagnostics.report.differences import find_differences
from lossscale.diagnostics.report.levels import MOST_STEPS, make_levels
from lossscale.diagnostics.report.policies import (
    OtherPolicies,
    encode_curves,
    policies_section,
)
from lossscale.diagnostics.report.summary import Summary
from lossscale.diagnostics.report.tensors import (
    encode_heat_map,
    encode_histograms,
    make_heat_map,
    make_histograms,
)
from lossscale.diagnostics.report.wording import encodable
from lossscale.errors import StateError

MOST_BYTES = 1_500_000
"""How large a page may be."""

UPLOT_VERSION = "1.6.32"
UPLOT_SHA256 = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
"""Of `assets/uPlot.iife.min.js`, as its author published it."""

_SHOWN_FORMATS = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3")
_NARROW = ("float16", "float8_e5m2", "float8_e4m3")
_DATA_BYTES = 1_150_000
"""What the numbers of all runs may have together; the rest is script and text."""


def make_page(
    runs: Sequence[RunFile],
    summaries: Sequence[Summary],
    policies: OtherPolicies | None = None,
) -> str:
    """Return the page of some runs.

    Args:
        runs: One or several.
        summaries: What `summarize_run` says about each.
        policies: What other policies would have done, if there is one run.

    Raises:
        StateError: If the page would be larger than a page may be.
    """
    curves = [] if policies is None else encode_curves(policies, _DATA_BYTES // 4)
    budget = _DATA_BYTES - len(json.dumps(curves))
    data = [
        _run_data(*pair, len(runs), budget // len(runs))
        for pair in zip(runs, summaries, strict=True)
    ]
    page = _assemble(summaries, _embed(_page_data(data, curves)), policies)
    if len(page.encode()) > MOST_BYTES:
        data = [_without_tensors(one) for one in data]
        page = _assemble(summaries, _embed(_page_data(data, curves)), policies)
    size = len(page.encode())
    if size > MOST_BYTES:
        message = (
            f"A page of {len(runs)} runs would have {size:,} bytes, and at most "
            f"{MOST_BYTES:,} are allowed. Report fewer runs at a time."
        )
        raise StateError(message)
    return page


def _run_data(
    run: RunFile, summary: Summary, count: int, budget: int
) -> dict[str, Any]:
    """Return what the script draws of one of some runs, in so many bytes."""
    heat_map = make_heat_map(run)
    histograms = make_histograms(run, heat_map)
    data: dict[str, Any] = {
        "title": summary.title[:_LONGEST_TITLE],
        "dtype": summary.dtype,
        "wide": summary.dtype not in _NARROW,
        "first": summary.first_step,
        "last": summary.last_step,
        "alarms": [[alarm.step, alarm.kind] for alarm in summary.alarms[:_MOST_ALARMS]],
        "heat": None if heat_map is None else encode_heat_map(heat_map),
        "histograms": None if histograms is None else encode_histograms(histograms),
    }
    if len(json.dumps(data)) > budget // 2:
        data = _without_tensors(data)
    left = budget - len(json.dumps(data))
    alarm_steps = [alarm.step for alarm in summary.alarms]
    most = MOST_STEPS // count
    return data | {"chunks": make_levels(run, alarm_steps, left, most_steps=most)}


_LONGEST_TITLE = 200
_MOST_ALARMS = 200


def _without_tensors(data: dict[str, Any]) -> dict[str, Any]:
    """Return a run's data without what is largest if names are long."""
    return data | {"heat": None, "histograms": None}


def _page_data(
    runs: list[dict[str, Any]], curves: list[dict[str, Any]]
) -> dict[str, Any]:
    measured = [index for index, run in enumerate(runs) if run["heat"] is not None]
    narrow = [index for index in measured if not runs[index]["wide"]]
    recorded = [index for index, run in enumerate(runs) if run["first"] is not None]
    return {
        "runs": runs,
        "policies": curves,
        # The last one that is of interest: in a comparison, the one that was tried.
        "tensor_run": (narrow or measured or recorded or [0])[-1],
        "formats": {
            name: {
                "largest": FORMATS[name].largest,
                "smallest_normal": FORMATS[name].smallest_normal,
                "smallest": FORMATS[name].smallest,
            }
            for name in _SHOWN_FORMATS
        },
    }


def _embed(value: Any) -> str:
    """Return JSON that a script element can hold: it has no `<`."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "").replace("\u2029", "")


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _assemble(
    summaries: Sequence[Summary], data: str, policies: OtherPolicies | None
) -> str:
    library = _asset("uPlot.iife.min.js")
    script = f"\n{library}\n{_asset('page.js')}"
    style = f"\n{_asset('uPlot.min.css')}\n{_asset('page.css')}"
    first = min(
        (s.first_step for s in summaries if s.first_step is not None), default=0
    )
    last = max((s.last_step for s in summaries if s.last_step is not None), default=0)
    page = Template(_asset("page.html")).substitute(
        policy=(
            f"default-src 'none'; script-src '{_hash(script)}'; "
            f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
        ),
        version=escape(_version()),
        kind="Loss scale report" if policies is None else "Loss scale backtest",
        title=escape(sections.title(summaries)),
        lede=sections.lede(summaries),
        body_class="several" if len(summaries) > 1 else "single",
        style=style,
        script=script,
        overview=sections.overview(summaries),
        alarms=sections.alarms(summaries),
        advice=sections.advice(summaries),
        first_step=first,
        last_step=last,
        run_toggles=sections.run_toggles(summaries),
        run_chooser=sections.run_chooser(summaries, json.loads(data)["tensor_run"]),
        policies="" if policies is None else policies_section(policies),
        updates=sections.updates(summaries),
        nonfinite=sections.nonfinite(summaries),
        differences=sections.differences(summaries, find_differences(summaries)),
        about=sections.about(summaries),
        uplot_version=UPLOT_VERSION,
        uplot_hash=hashlib.sha256(library.encode()).hexdigest(),
        uplot_licence=escape(_asset("uPlot-LICENSE.txt")),
        data=data,
    )
    return encodable(page)


def _hash(text: str) -> str:
    """Return what a content security policy names an inline element by."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _version() -> str:
    try:
        return version("lossscale")
    except PackageNotFoundError:  # it runs from its source
        return "from source"
