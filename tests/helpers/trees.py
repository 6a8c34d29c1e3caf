"""Compares trees of JAX arrays bit by bit."""

import jax
import numpy as np


def check_same(expected, actual):
    """Raise unless two trees have the same structure, types and bits."""
    structures = jax.tree.structure(expected), jax.tree.structure(actual)
    if structures[0] != structures[1]:
        message = f"expected {structures[0]}, got {structures[1]}"
        raise AssertionError(message)
    leaves = zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True)
    for want, have in leaves:
        kinds = [(x.dtype, x.shape, jax.typeof(x).weak_type) for x in (want, have)]
        if kinds[0] != kinds[1]:
            message = f"expected {kinds[0]}, got {kinds[1]}"
            raise AssertionError(message)
        np.testing.assert_array_equal(want, have)
