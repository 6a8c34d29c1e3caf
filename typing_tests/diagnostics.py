"""The types that a user of `lossscale.diagnostics` sees."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from typing_extensions import assert_type

from lossscale import Dynamic, Fixed, Headroom, Policy
from lossscale.diagnostics import (
    Alarm,
    AlarmRules,
    Backtest,
    Estimate,
    LostFraction,
    Outcome,
    Recommendation,
    Recorder,
    RunExplanation,
    RunFile,
    StepRecord,
    TensorStatistics,
    UpdateStatistics,
    backtest,
    build_report,
    explain_run,
    export_parquet,
    read_run,
    recommend,
)
from lossscale.diagnostics.loggers import LoggingWriter, WindowWriter
from lossscale.diagnostics.records.steps import ReportLike
from lossscale.torch import GradScaler, StepReport


class Mine(WindowWriter):
    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        assert_type(metrics["lossscale/scale"], float)


def on_alarm(alarm: Alarm) -> None:
    assert_type(alarm.last_good_step, int | None)
    assert_type(alarm.names, tuple[str, ...])


def record(path: Path) -> None:
    with Recorder(
        path,
        policy=Dynamic(),
        names=["a", "b"],
        alarms=AlarmRules(backoffs=3),
        on_alarm=on_alarm,
        writers=[LoggingWriter(), Mine(every=10)],
    ) as recorder:
        assert_type(recorder, Recorder)
        recorder.record(scale=8.0, applied=True, loss=2.0)
        recorder.note(1, loss=2.0)


def read(path: Path) -> None:
    run = read_run(path)
    assert_type(run, RunFile)
    assert_type(run.records(1, 5), Iterator[StepRecord])
    for step in run.records():
        assert_type(step.nonfinite, tuple[tuple[str, str], ...])
        assert_type(step.loss, float | None)
    assert_type(build_report([path], format="md"), str)
    assert_type(explain_run(path, step=3), RunExplanation)
    assert_type(export_parquet(path, "run.parquet"), int)


def attach(path: Path, report: StepReport) -> ReportLike:
    GradScaler("cpu", on_step=Recorder(path))
    assert_type(report.statistics, TensorStatistics | None)
    if report.statistics is not None and report.statistics.updates is not None:
        assert_type(report.statistics.updates, UpdateStatistics)
        assert_type(report.statistics.updates.lost, Sequence[float])
    return report


def try_policies(path: Path) -> None:
    found = backtest(path, {"low": Fixed(8.0), "headroom": Headroom()})
    assert_type(found, Backtest)
    assert_type(found.outcomes["low"], Outcome)
    assert_type(found.recorded.skipped, Estimate)
    assert_type(found.recorded.lost, LostFraction | None)
    backtest(read_run(path), [Dynamic(), Fixed()])
    backtest(path, ["torch"])  # type: ignore[list-item]


def choose(path: Path) -> str:
    found = recommend(path)
    assert_type(found, Recommendation)
    assert_type(found.policy, Policy | None)
    return found.code
