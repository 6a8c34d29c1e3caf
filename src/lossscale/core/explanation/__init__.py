# SPDX-License-Identifier: Apache-2.0
"""Why a batch was not finite: what was seen as data, and the same in sentences.

kinds.py      what a tensor has that is not finite
causes.py     from what was not finite at the end to the first cause
evaluated.py  operations that were evaluated as nodes
trials.py     which lower scales to try
findings.py   Finding, Trial, Explanation: frozen data that every framework fills in
origins.py    how a number that is not finite comes about, by name
numbers.py    numbers as people read them
wording.py    the sentences; nothing is said that the data does not show

Adapters make explanations, diagnostics and the command line read them, so that they are
in the core. Imports the standard library and the core only.
"""

from lossscale.core.explanation.findings import Explanation, Finding, Trial

__all__ = ["Explanation", "Finding", "Trial"]
