# SPDX-License-Identifier: Apache-2.0
"""Other policies on the page of a run: their scales in its chart, and a table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lossscale.diagnostics.records.steps import CAUSES
from lossscale.diagnostics.report.buckets import SERIES, Buckets, power_of_two
from lossscale.diagnostics.report.levels import fit_chunks
from lossscale.diagnostics.report.sections import escape_text, line_key, make_table
from lossscale.diagnostics.sequences import Scales

_MOST_BUCKETS = 65_536
_LONGEST_TITLE = 200


class OtherPolicies(NamedTuple):
    """What other policies would have done in a run."""

    steps: npt.NDArray[np.int64]
    """The steps of the run."""
    scales: dict[str, Scales]
    """The scale of every step under each policy, by its name."""
    heads: Sequence[str]
    """The columns of the table."""
    rows: Sequence[Sequence[str]]
    """Its rows: the run itself, then the policies in their order."""
    remarks: Sequence[str]
    """What the table does not show."""


def encode_curves(policies: OtherPolicies, budget: int) -> list[dict[str, Any]]:
    """Return the scales of the policies as the page draws them.

    Args:
        policies: The policies.
        budget: How many bytes they may have together.
    """
    share = budget // max(1, len(policies.scales))
    return [
        {
            "title": name[:_LONGEST_TITLE],
            "first": int(policies.steps[0]),
            "last": int(policies.steps[-1]),
            "chunks": fit_chunks(_buckets(policies.steps, scales), share),
        }
        for name, scales in policies.scales.items()
    ]


def _buckets(steps: npt.NDArray[np.int64], scales: Scales) -> Buckets:
    """Return a curve as buckets, not more than can be shown."""
    width = power_of_two(-(-steps.size // _MOST_BUCKETS))
    starts = np.arange(0, steps.size, width)
    ends = np.append(starts[1:], steps.size) - 1
    missing = np.full(starts.size, np.nan, np.float32)
    nothing = {name: missing for name in SERIES if name != "scale"}
    return Buckets(
        first=steps[starts],
        last=steps[ends],
        low={"scale": np.minimum.reduceat(scales, starts), **nothing},
        high={"scale": np.maximum.reduceat(scales, starts), **nothing},
        causes=np.zeros((starts.size, len(CAUSES)), np.uint32),
        broken=np.zeros(starts.size, np.uint32),
    )


def policies_section(policies: OtherPolicies) -> str:
    """Return the table of the policies, and what it does not show."""
    rows = [[_head(index, row[0]), *row[1:]] for index, row in enumerate(policies.rows)]
    table = make_table(policies.heads, rows, escaped_first=True)
    remarks = "".join(f"<li>{escape_text(text)}</li>" for text in policies.remarks)
    return (
        '<section id="policies" aria-labelledby="policies-title">'
        '<h3 id="policies-title">Other policies</h3>'
        '<p class="sub">What each would have done with the gradients of this run. In '
        "brackets the bounds of what the record leaves open. Untick a policy to take "
        "its scale out of the chart.</p>"
        f'{table}<ul class="advice">{remarks}</ul></section>'
    )


def _head(index: int, name: str) -> str:
    """Return the first cell of a row: a box that shows and hides the line, its look."""
    label = f"{line_key(index)} {escape_text(name)}"
    if not index:
        return f'<span class="line-name">{label}</span>'
    box = f'<input type="checkbox" class="toggle-run" value="{index}" checked>'
    return f'<label class="line-name">{box}{label}</label>'
