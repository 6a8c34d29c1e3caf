"""The conformance suite on torch: eager, and in torch.compile as one graph."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402
from conformance import (  # noqa: E402
    ClassicConformance,
    DataPolicyConformance,
    Framework,
    FunctionalConformance,
    HeadroomConformance,
)

import lossscale.torch as ls  # noqa: E402
from lossscale.torch import classic  # noqa: E402


def array(values):
    # A copy: torch.from_numpy shares its memory, and warns about what is read-only.
    return torch.from_numpy(np.array(values))


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


class TestEager(FunctionalConformance, DataPolicyConformance, HeadroomConformance):
    framework = Framework(module=ls, array=array, numpy=np.asarray, complex=True)


class TestClassic(ClassicConformance):
    framework = Framework(module=classic, array=array, numpy=np.asarray, complex=True)


class TestCompiled(FunctionalConformance, DataPolicyConformance, HeadroomConformance):
    framework = Framework(
        module=ls,
        array=array,
        numpy=np.asarray,
        complex=True,
        compile=compiled,
        shares_compiled=False,
    )


def test_every_exported_name_exists_and_is_sorted():
    for module in (ls, classic):
        assert sorted(module.__all__) == module.__all__
        for name in module.__all__:
            assert getattr(module, name) is not None
