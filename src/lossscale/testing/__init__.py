# SPDX-License-Identifier: Apache-2.0
"""Faults for your own tests: inf, NaN or huge values in a named tensor, at given steps.

faults.py      what is written, into which number, at which steps; validated
torch.py       a context manager on a module or an optimizer
keras.py       a context manager on a compiled model
jax.py         a pure function of a tree and the step, for use under `jit`
tensorflow.py  the same for a structure of tensors, eagerly and in graphs
numpy.py       the same for arrays

Each framework's module has one function, `inject`. This package imports none of them:

    from lossscale.testing.torch import inject
"""
