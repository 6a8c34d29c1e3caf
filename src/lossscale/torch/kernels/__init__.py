# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: one read of all gradients, one verdict, one step of the rule.

Imported late and only where it is used, by `lossscale.torch.fast`: importing Triton
after TensorFlow ends the process.
"""
