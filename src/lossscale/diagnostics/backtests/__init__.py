# SPDX-License-Identifier: Apache-2.0
"""What other policies would have done in a recorded run, and what follows for the next.

steps.py            the steps of a record as columns, read in pieces
gap.py              how far below the format's maximum the steps overflowed
limits.py           up to which scale each step is finite: at most, probably, at least
underflow.py        the values that vanish at another scale
outcome.py          what is said about one policy
backtest.py         backtest
tables.py           the results as tables, JSON and Markdown
evidence.py         what a record shows of its first steps, skips and growths
recommendation.py   recommend
code.py             a policy as code to paste
"""
