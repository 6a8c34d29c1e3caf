"""Eight host devices, strict dtype promotion and JAX's own checks for all tests here.

The number of devices is read when JAX starts its backend, so it is set before that.
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
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_enable_checks", True)

    @pytest.fixture
    def standard_promotion():
        """Allow implicit promotion, for libraries that rely on it."""
        with jax.numpy_dtype_promotion("standard"):
            yield
