# SPDX-License-Identifier: Apache-2.0
"""Models in float16, with the parts that need float32 kept in float32.

conversion.py   to_float16, to_float32
selection.py    which modules and tensors stay in float32, and why
range.py        parameters and buffers with numbers that float16 does not have
sharing.py      modules and parameters that would be needed in both dtypes
casts.py        hooks that cast what goes into a module and what it returns
nested.py       casts of tensors inside tuples, dictionaries and dataclasses
mixed_norms.py  normalisation layers with float32 weights that take float16
row_norm.py     when kernels normalize, and their place in autograd
kernels/        Triton kernels
"""

from lossscale.torch.half_precision.conversion import (
    Conversion,
    to_float16,
    to_float32,
)

__all__ = ["Conversion", "to_float16", "to_float32"]
