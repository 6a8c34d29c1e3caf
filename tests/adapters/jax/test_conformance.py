"""The conformance suite on JAX: eager and under jit, and with 64-bit numbers."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from conformance import (  # noqa: E402
    DataPolicyConformance,
    Framework,
    FunctionalConformance,
    HeadroomConformance,
)

import lossscale.jax as ls  # noqa: E402

NARROW = ("float16", "float32")


class OnlyComplex64(FunctionalConformance, DataPolicyConformance, HeadroomConformance):
    """Without 64-bit numbers there is no complex128."""

    @pytest.mark.parametrize("dtype", ["complex64"])
    def test_complex_gradients_are_unscaled_or_named(self, dtype):
        super().test_complex_gradients_are_unscaled_or_named(dtype)


class TestEager(OnlyComplex64):
    framework = Framework(
        module=ls, array=jnp.asarray, numpy=np.asarray, dtypes=NARROW, complex=True
    )


class TestJit(OnlyComplex64):
    framework = Framework(
        module=ls,
        array=jnp.asarray,
        numpy=np.asarray,
        dtypes=NARROW,
        complex=True,
        compile=jax.jit,
    )


class TestWide(FunctionalConformance, DataPolicyConformance, HeadroomConformance):
    """Where 64-bit numbers are enabled, the state stays float32 and int32."""

    framework = Framework(
        module=ls, array=jnp.asarray, numpy=np.asarray, complex=True, compile=jax.jit
    )

    @pytest.fixture(autouse=True)
    def wide(self):
        with jax.enable_x64(True):
            yield


def test_every_exported_name_exists_and_is_sorted():
    assert sorted(ls.__all__) == ls.__all__
    for name in ls.__all__:
        assert getattr(ls, name) is not None
