# SPDX-License-Identifier: Apache-2.0
"""One read of an optimizer's gradients: finite or not, norm, largest magnitude.

request.py         what to measure
inspector.py       GradientInspector: collect, measure, decide over ranks
groups.py          GradientGroups: by device, backend and sharding
ranked.py          the same summary on all ranks
summary.py         GradientSummary: the result, on the host or in one small buffer
buffer_pools.py    small buffers, allocated 32 at a time
headroom.py        how large a gradient each optimizer can hold
layout_cache.py    whether the gradients are laid out as a step ago
statistics.py      statistics of every tensor, on the steps that are sampled
eager.py           torch's operations: any device, and the oracle of the kernels
host.py            the same on a CPU, where each result is read at once
host_norms.py      tensor by tensor, where one sum does not answer
kernel_backend.py  where the Triton kernels can be used
kernels/           Triton kernels
custom_ops.py      torch.ops.lossscale, for compiled functions
"""
