# SPDX-License-Identifier: Apache-2.0
"""`backtest`: what other policies would have done in a recorded run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lossscale.core.policies import Dynamic, Policy
from lossscale.core.validation import format_value
from lossscale.diagnostics.backtests.code import write_policy
from lossscale.diagnostics.backtests.outcome import (
    Material,
    Outcome,
    describe_recorded,
    prepare,
    run_one,
)
from lossscale.diagnostics.backtests.remarks import list_remarks
from lossscale.diagnostics.backtests.steps import (
    OnProgress,
    RecordedSteps,
    read_steps,
)
from lossscale.diagnostics.backtests.underflow import read_samples
from lossscale.diagnostics.records.reader import read_run
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.simulation import WORTH_COMPILING, list_policies
from lossscale.errors import SettingTypeError, StateError


@dataclass(frozen=True, eq=False)
class Backtest:
    """What policies would have done in a recorded run.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale import Fixed
        >>> from lossscale.diagnostics import Recorder, backtest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path) as recorder:
        ...         for _ in range(100):
        ...             recorder.record(scale=1024.0, applied=True, amax=0.25)
        ...     result = backtest(path, {"high": Fixed(2.0**20)})
        >>> result.recorded.skipped.likely, result.outcomes["high"].skipped.likely
        (0, 100)
    """

    steps: RecordedSteps
    """The steps of the record."""
    dtype: str
    """The format in which its gradients were stored."""
    recorded: Outcome
    """What the run itself did."""
    outcomes: dict[str, Outcome]
    """What each policy would have done, by its name."""
    remarks: tuple[str, ...]
    """What the record does not show, in sentences."""


def backtest(
    run: RunFile | str | os.PathLike[str],
    policies: Sequence[Policy] | Mapping[str, Policy],
    *,
    on_progress: OnProgress | None = None,
) -> Backtest:
    """Say what other policies would have done in a recorded run.

    The recorded policy takes exactly the recorded steps again, if it moves the scale by
    what is recorded of each step. What the record does not say is assumed in three
    ways, which give an estimate and its bounds. Gradients are taken as recorded: that
    the training would have gone on otherwise after other skips, no record shows.

    Args:
        run: A run that a `Recorder` wrote, or its path.
        policies: Any policies, in a list or by name.
        on_progress: Called now and then, for a progress bar: after every 65,536 steps
            that are read, and after every policy.

    Raises:
        SettingTypeError: If the policies are not policies.
        StateError: If the run cannot be read, or holds no step.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lossscale import Dynamic, Fixed
        >>> from lossscale.diagnostics import Recorder, backtest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path) as recorder:
        ...         for _ in range(100):
        ...             recorder.record(scale=1024.0, applied=True, amax=0.25)
        ...     found = backtest(path, {"high": Fixed(2.0**20), "low": Fixed(4.0)})
        >>> [outcome.skipped.likely for outcome in found.outcomes.values()]
        [100, 0]
    """
    by_name = _name_policies(policies)
    run = run if isinstance(run, RunFile) else read_run(run)
    material = read_material(run, on_progress)
    return Backtest(
        steps=material.steps,
        dtype=run.dtype,
        recorded=describe_recorded(material),
        outcomes=run_all(by_name, material, on_progress),
        remarks=tuple(list_remarks(material, by_name)),
    )


def read_material(run: RunFile, on_progress: OnProgress | None = None) -> Material:
    """Return what a run's record says, for any policy.

    Raises:
        StateError: If it holds no step.
    """
    steps = read_steps(run, on_progress)
    if not steps.size:
        message = f"{run.path} holds no step: there is nothing to try policies on."
        raise StateError(message)
    return prepare(steps, read_samples(run), run.dtype)


def run_all(
    policies: Mapping[str, Policy],
    material: Material,
    on_policy: OnProgress | None = None,
) -> dict[str, Outcome]:
    """Return what each policy would have done."""
    dynamic = sum(type(policy) is Dynamic for policy in policies.values())
    transitions = dynamic * material.steps.size * len(material.limits.all)
    outcomes = {}
    for name, policy in policies.items():
        compiled = transitions > WORTH_COMPILING
        outcomes[name] = run_one(policy, material, compiled=compiled)
        if on_policy is not None:
            on_policy()
    return outcomes


def _name_policies(
    policies: Sequence[Policy] | Mapping[str, Policy],
) -> dict[str, Policy]:
    """Return policies by name, checked."""
    if isinstance(policies, Mapping):
        list_policies(policies.values())
        by_name = dict(policies)
    else:
        by_name = {write_policy(policy): policy for policy in list_policies(policies)}
    if not by_name:
        message = (
            "policies must be policies such as [lossscale.Dynamic()], in a list or by "
            f"name; got {format_value(policies)}."
        )
        raise SettingTypeError(message)
    return by_name
