# SPDX-License-Identifier: Apache-2.0
"""Diagnostics: record every step of a training, and find out what happened in it.

Recording, reading and the alarms need the standard library alone; simulations, tensor
statistics and reports need NumPy as well, and are loaded when they are first used.
Adapters do not import this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lossscale.core.statistics import TensorStatistics, UpdateStatistics
from lossscale.diagnostics.alarms import Alarm, AlarmRules
from lossscale.diagnostics.explanation import RunExplanation, explain_run
from lossscale.diagnostics.loggers.jax import record_in_jit
from lossscale.diagnostics.records.parquet import export_parquet
from lossscale.diagnostics.records.reader import read_run
from lossscale.diagnostics.records.recorder import Recorder
from lossscale.diagnostics.records.run_file import RecordWarning, RunFile
from lossscale.diagnostics.records.steps import StepRecord

if TYPE_CHECKING:
    from lossscale.diagnostics.backtests.backtest import Backtest, backtest
    from lossscale.diagnostics.backtests.outcome import Estimate, Outcome
    from lossscale.diagnostics.backtests.recommendation import (
        Recommendation,
        recommend,
    )
    from lossscale.diagnostics.backtests.underflow import LostFraction
    from lossscale.diagnostics.recording import Recording, read_recording
    from lossscale.diagnostics.report.build import build_report
    from lossscale.diagnostics.simulation import Simulation, simulate
    from lossscale.diagnostics.statistics import (
        ExponentHistogram,
        exponent_histogram,
        measure_tensors,
    )

__all__ = [
    "Alarm",
    "AlarmRules",
    "Backtest",
    "Estimate",
    "ExponentHistogram",
    "LostFraction",
    "Outcome",
    "Recommendation",
    "RecordWarning",
    "Recorder",
    "Recording",
    "RunExplanation",
    "RunFile",
    "Simulation",
    "StepRecord",
    "TensorStatistics",
    "UpdateStatistics",
    "backtest",
    "build_report",
    "explain_run",
    "exponent_histogram",
    "export_parquet",
    "measure_tensors",
    "read_recording",
    "read_run",
    "recommend",
    "record_in_jit",
    "simulate",
]

_WITH_NUMPY = {
    "Backtest": "backtests.backtest",
    "Estimate": "backtests.outcome",
    "ExponentHistogram": "statistics",
    "LostFraction": "backtests.underflow",
    "Outcome": "backtests.outcome",
    "Recommendation": "backtests.recommendation",
    "Recording": "recording",
    "Simulation": "simulation",
    "backtest": "backtests.backtest",
    "build_report": "report.build",
    "exponent_histogram": "statistics",
    "measure_tensors": "statistics",
    "read_recording": "recording",
    "recommend": "backtests.recommendation",
    "simulate": "simulation",
}
"""The names that need NumPy, and where each of them is."""


def __getattr__(name: str) -> Any:
    """Return a name that needs NumPy; without it, say what to install."""
    if name not in _WITH_NUMPY:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    importlib.import_module("lossscale.numpy")
    module = importlib.import_module(f"{__name__}.{_WITH_NUMPY[name]}")
    return getattr(module, name)
