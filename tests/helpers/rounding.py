"""Stochastic rounding to bfloat16, by NumPy's unsigned integers."""

import numpy as np


def round_stochastically(values, step):
    """Return float32 numbers that bfloat16 has, as float32.

    Args:
        values: Float32 numbers, in the order of memory.
        step: The number of the step.
    """
    index = np.arange(values.size, dtype=np.uint64)
    bits = (index & 0xFFFFFFFF).astype(np.uint32)
    bits ^= (index >> np.uint64(32)).astype(np.uint32) * np.uint32(0x85EBCA6B)
    bits += np.array([step * 0x9E3779B9 % 2**32], np.uint32)
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(0x7FEB352D)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x846CA68B)
    noise = bits >> np.uint32(16)
    flat = values.ravel().view(np.uint32)
    rounded = ((flat + noise) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(values.ravel()), values.ravel(), rounded)
