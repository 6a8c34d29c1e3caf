# SPDX-License-Identifier: Apache-2.0
"""The page of a run with what other policies would have done in it."""

from lossscale.diagnostics.backtests.backtest import Backtest
from lossscale.diagnostics.backtests.tables import HEADS, list_rows
from lossscale.diagnostics.records.run_file import RunFile
from lossscale.diagnostics.report.page import make_page
from lossscale.diagnostics.report.policies import OtherPolicies
from lossscale.diagnostics.report.summary import summarize_run


def make_backtest_page(run: RunFile, backtest: Backtest) -> str:
    """Return the report page of a run, with the results of a backtest in it."""
    policies = OtherPolicies(
        steps=backtest.steps.numbers,
        scales={name: outcome.scales for name, outcome in backtest.outcomes.items()},
        heads=HEADS,
        rows=list_rows(backtest),
        remarks=backtest.remarks,
    )
    return make_page([run], [summarize_run(run)], policies)
