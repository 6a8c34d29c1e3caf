# SPDX-License-Identifier: Apache-2.0
"""What policies that measure do where a sequence of steps lacks what they read.

Imports the standard library and the core only.
"""

from collections.abc import Iterator, Mapping

from lossscale.core.data_policies import AutoStart, RuleBased
from lossscale.core.measurements import find_edge
from lossscale.core.policies import Policy, wanted_measurements


def explain_unmeasured(
    policies: Mapping[str, Policy], *, measured: int, steps: int
) -> Iterator[str]:
    """Yield which policies ran without the measurements that they read.

    Args:
        policies: The policies that were run, by the names of their rows.
        measured: How many of the finite steps have a largest magnitude.
        steps: How many finite steps there are.
    """
    readers = {
        name: policy
        for name, policy in policies.items()
        if "amax" in wanted_measurements(policy)
    }
    starting = [name for name in readers if isinstance(readers[name], AutoStart)]
    ruled = [
        name
        for name, policy in readers.items()
        if isinstance(policy, RuleBased) and name not in starting
    ]
    others = [name for name in readers if name not in (*starting, *ruled)]
    if measured:
        if ruled and measured < steps:
            word, its = _agree(ruled, "reads", "read")
            yield (
                f"{_join_names(ruled)} {word} magnitudes: in finite steps without "
                f"one, only {its} rule ran."
            )
        edged = [
            name
            for name in ruled
            if find_edge(wanted_measurements(readers[name])) is not None
        ]
        if edged:
            word, its = _agree(edged, "reads", "read")
            yield (
                f"{_join_names(edged)} {word} the fraction of values above {its} edge "
                "where it is measured; here the largest magnitude alone is compared."
            )
        return
    if ruled:
        word, its = _agree(ruled, "reads", "read")
        rows = "its row is" if len(ruled) == 1 else "their rows are"
        yield (
            f"{_join_names(ruled)} {word} magnitudes, and these steps have none: only "
            f"{its} rule ran, and {rows} what a plain Dynamic does."
        )
    if starting:
        word, its = _agree(starting, "sets", "set")
        yield (
            f"{_join_names(starting)} {word} {its} start from a magnitude, and these "
            "steps have none: the start here is the scale at which the first step was "
            "finite."
        )
    if others:
        word, _ = _agree(others, "reads", "read")
        yield (
            f"{_join_names(others)} {word} magnitudes, and these steps have none: the "
            "result is what happens without."
        )


def _agree(names: list[str], one: str, several: str) -> tuple[str, str]:
    """Return a word and a possessive for so many names."""
    return (one, "its") if len(names) == 1 else (several, "their")


def _join_names(names: list[str]) -> str:
    """Return names as the subject of a sentence; of many the first alone."""
    shown = names[:_MOST_LISTED]
    if len(names) > _MOST_LISTED:
        return f"{', '.join(shown)} and {len(names) - _MOST_LISTED} more"
    *first, last = shown
    return f"{', '.join(first)} and {last}" if first else last


_MOST_LISTED = 8
