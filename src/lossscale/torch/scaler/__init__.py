# SPDX-License-Identifier: Apache-2.0
"""What `GradScaler` is composed of; no file here imports it.

options.py           the constructor's arguments, validated once
state.py             overflow count, counters and kernel settings; saving and pickling
scale_update.py      a policy on Python numbers, tensors or a kernel
iteration.py         the stages of a step, for each optimizer: guards and transitions
fused_optimizers.py  optimizers that take `grad_scale` and `found_inf`
wrapped_optimizers.py  the optimizers of packages that wrap torch's
clipping.py          arguments of `clip_grad_norm_`; clipping of unscaled gradients
closures.py          optimizers that call the loss: snapshot, check, restore
accumulation.py      sums of micro-batches
report.py            StepReport
history.py           delivery of reports; schedulers, the collapse warning
param_names.py       names of parameters for reports and errors
"""
