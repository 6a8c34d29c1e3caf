"""Keras with the backend that the test runner chose; skips the module without one."""

import os

import pytest

keras = pytest.importorskip("keras", reason="keras is not installed")
if "KERAS_BACKEND" not in os.environ:
    pytest.skip(
        "KERAS_BACKEND is not set: the test runner sets it to each backend in turn",
        allow_module_level=True,
    )

BACKEND = keras.backend.backend()

# Keras 3.15 converts its variables in a way that NumPy 2.4 announces to end.
QUIET = pytest.mark.filterwarnings("ignore:__array__ implementation")


def only_on(*backends):
    """Skip on other backends; the reason says what is missing there."""
    return pytest.mark.skipif(
        BACKEND not in backends,
        reason=f"needs the {' or '.join(backends)} backend, this is {BACKEND}",
    )


def numpy(value):
    """Return a variable or tensor of any backend as a NumPy array."""
    return keras.ops.convert_to_numpy(getattr(value, "value", value))
