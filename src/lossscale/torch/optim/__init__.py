# SPDX-License-Identifier: Apache-2.0
"""`AdamW`, `Adam` and `SGD` that unscale, skip and update in one pass.

They are subclasses of torch's optimizers, with torch's arguments, results and state
dicts. With `master_weights=True` they train float16 or bfloat16 parameters and keep
float32 masters of them.

optimizer.py  what the three have in common: the step, masters, state dicts
adam.py       Adam and AdamW
sgd.py        SGD
eager.py      a step by torch's own functions, on any device
host.py       Adam on a CPU, in runs that fit into the cache
kept_tensors.py  the state whose addresses the kernels have
plan.py       which parameters the kernels update and which torch's functions do
rounding.py   second moments in bfloat16
kernels/      Triton kernels
"""

from lossscale.torch.optim.adam import Adam, AdamW
from lossscale.torch.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
