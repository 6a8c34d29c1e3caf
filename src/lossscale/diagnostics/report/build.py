# SPDX-License-Identifier: Apache-2.0
"""Build the report of recorded runs, in one of its formats."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from lossscale.core import validation
from lossscale.diagnostics.records.reader import OnProgress, read_run
from lossscale.diagnostics.report.differences import find_differences
from lossscale.diagnostics.report.markdown import make_markdown
from lossscale.diagnostics.report.page import make_page
from lossscale.diagnostics.report.summary import (
    REPORT_FORMAT,
    Summary,
    summarize_run,
)
from lossscale.errors import SettingError

FORMATS = ("html", "md", "json")
"""The formats of a report."""


def build_report(
    paths: Sequence[str | os.PathLike[str]],
    *,
    format: str = "html",  # noqa: A002  # what it is called everywhere else
    on_progress: OnProgress | None = None,
) -> str:
    """Return the report of one run, or of several next to each other.

    Args:
        paths: The files that a `Recorder` wrote, one per run.
        format: "html" for one page that opens without a network, "md" for Markdown,
            "json" for machines.
        on_progress: Called now and then while a run without a roll-up is read.

    Raises:
        StateError: If a file is not a recorded run, or cannot be read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale.diagnostics import Recorder, build_report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path) as recorder:
        ...         recorder.record(scale=65536.0, applied=True, loss=2.3)
        ...     build_report([path], format="md").splitlines()[0]
        '## run'
    """
    validation.check_choice("format", format, FORMATS)
    if isinstance(paths, (str, os.PathLike)) or not paths:
        message = f"paths must be one or more files in a list, got {paths!r}."
        if isinstance(paths, (str, os.PathLike)):
            message = f"{message} Write build_report([{os.fspath(paths)!r}])."
        raise SettingError(message)
    runs = [read_run(path, on_progress=on_progress) for path in paths]
    titles = _tell_apart([run.title for run in runs], [run.path for run in runs])
    summaries = [
        replace(summarize_run(run), title=title)
        for run, title in zip(runs, titles, strict=True)
    ]
    if format == "html":
        return make_page(runs, summaries)
    return make_markdown(summaries) if format == "md" else _make_json(summaries)


def _tell_apart(titles: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return titles, with what differs in the paths of those that are the same."""
    found = list(titles)
    for title in {*titles}:
        same = [index for index, other in enumerate(titles) if other == title]
        differing = _differing_parts([paths[index] for index in same])
        for index, part in zip(same, differing, strict=True):
            found[index] = f"{title} ({part})" if part else title
    return found


def _differing_parts(paths: Sequence[Path]) -> list[str]:
    """Return what is between the folders and the names that all paths share."""
    parts = [path.absolute().parts for path in paths]
    start = _count_shared(parts)
    parts = [part[start:] for part in parts]
    end = _count_shared([part[::-1] for part in parts])
    return ["/".join(part[: len(part) - end]) for part in parts]


def _count_shared(rows: Sequence[Sequence[str]]) -> int:
    """Return how many entries are the same at the start of all rows."""
    shared = takewhile(lambda entries: len({*entries}) == 1, zip(*rows, strict=False))
    return len(list(shared))


def _make_json(summaries: Sequence[Summary]) -> str:
    report = {
        "format": REPORT_FORMAT,
        "runs": [summary.as_json() for summary in summaries],
        "differences": [row._asdict() for row in find_differences(summaries)],
    }
    return json.dumps(report, indent=2, allow_nan=False) + "\n"
