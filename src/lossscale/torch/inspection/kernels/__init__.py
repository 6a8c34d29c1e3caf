# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: read all gradients once, summarize them, update the scale.

Imported late and only where kernels run, by
`lossscale.torch.inspection.kernel_backend`: importing Triton after TensorFlow aborts
the process.
"""
