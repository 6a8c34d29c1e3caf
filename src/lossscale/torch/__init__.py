# SPDX-License-Identifier: Apache-2.0
"""The PyTorch adapter: `GradScaler`, `ShardedGradScaler` and the functional API.

grad_scaler.py          GradScaler: public methods, torch's hooks, the order of calls
sharded_grad_scaler.py  ShardedGradScaler, for FSDP1
scaler/                 what GradScaler is composed of
inspection/             one read of an optimizer's gradients
distributed/            one decision for all ranks
optim/                  AdamW, Adam and SGD with float32 masters
explain/                why a batch was not finite
half_precision/         to_float16, to_float32
functional.py           init, scale, unscale, update, select
native/                 what the host does for every tensor at every step, in C
parameters.py           the parameters of an optimizer
gradient.py             one gradient: dense or sparse, real or complex
measurements.py         what `unscale` measures when it is asked to
classic/                TensorFlow's classic classes on torch tensors
devices.py              current device, CUDA graph capture, torch.compile
calls.py                warnings that point at the caller's line
attributes.py           computed attributes that a subclass may replace
torch_internals.py      private functions of torch that are relied on
"""

from lossscale.core.optional import explain_missing

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise explain_missing(error, "torch", "PyTorch") from None

from lossscale.torch.functional import init, scale, select, unscale, update
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.half_precision import to_float16, to_float32
from lossscale.torch.scaler.report import StepReport
from lossscale.torch.sharded_grad_scaler import ShardedGradScaler

__all__ = [
    "GradScaler",
    "ShardedGradScaler",
    "StepReport",
    "init",
    "scale",
    "select",
    "to_float16",
    "to_float32",
    "unscale",
    "update",
]
