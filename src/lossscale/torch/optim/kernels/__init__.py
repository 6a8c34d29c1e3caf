# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that update all parameters of an optimizer in one launch.

memory.py  addresses, reads and writes
adam.py    Adam and AdamW: bias corrections, then the update
sgd.py     SGD
tables.py  what the kernels know about the tensors, and the launches
settings.py, addresses.py, host_copies.py  what of it is copied when it changed

Imported late and only where kernels run, by `lossscale.torch.optim.plan`: importing
Triton after TensorFlow aborts the process.
"""
