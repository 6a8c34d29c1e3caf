"""The conformance suite on TensorFlow: eager, in tf.function and in XLA."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

import numpy as np  # noqa: E402
from conformance import (  # noqa: E402
    ClassicConformance,
    DataPolicyConformance,
    Framework,
    FunctionalConformance,
    HeadroomConformance,
)

import lossscale.tensorflow as ls  # noqa: E402

EAGER = Framework(module=ls, array=tf.constant, numpy=np.asarray)


def compiled(**options):
    return Framework(
        module=ls,
        array=tf.constant,
        numpy=np.asarray,
        compile=lambda function: tf.function(function, **options),
    )


class TestEager(
    FunctionalConformance,
    DataPolicyConformance,
    HeadroomConformance,
    ClassicConformance,
):
    framework = EAGER


class TestFunction(FunctionalConformance, DataPolicyConformance, HeadroomConformance):
    # With AutoGraph, as users write it; other tests trace without.
    framework = compiled()


class TestXla(FunctionalConformance, DataPolicyConformance, HeadroomConformance):
    framework = compiled(jit_compile=True, autograph=False)


def test_every_exported_name_exists_and_is_sorted():
    assert sorted(ls.__all__) == ls.__all__
    for name in ls.__all__:
        assert getattr(ls, name) is not None
