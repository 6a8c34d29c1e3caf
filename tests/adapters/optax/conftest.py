"""Eight host devices and JAX's own checks for all tests here.

The number of devices is read when JAX starts its backend, so it is set before that.
Strict dtype promotion has a test of its own: optax's own optimizers do not support it.
"""

import os

import pytest

FLAG = "--xla_force_host_platform_device_count=8"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()

try:
    import jax
except ModuleNotFoundError:  # each test module skips itself
    pass
else:
    jax.config.update("jax_enable_checks", True)

    @pytest.fixture(autouse=True)
    def _standard_promotion():
        with jax.numpy_dtype_promotion("standard"):
            yield
