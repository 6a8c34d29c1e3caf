# SPDX-License-Identifier: Apache-2.0
"""Why a step of a recorded run was skipped, as far as a record can say.

evidence.py  RunExplanation: what the record has about one skipped step
gather.py    explain_run: finds it in a run
wording.py   the same in sentences; nothing is said that the record does not show

To find the operation, the batch has to be run again: `GradScaler.explain` in PyTorch,
`lossscale.jax.explain`, `lossscale.keras.explain`. Imports the standard library only.
"""

from lossscale.diagnostics.explanation.evidence import RunExplanation
from lossscale.diagnostics.explanation.gather import explain_run

__all__ = ["RunExplanation", "explain_run"]
