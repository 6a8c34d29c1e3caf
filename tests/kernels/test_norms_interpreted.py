"""Normalisation by the kernels in Triton's interpreter, against float64 and casts."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "TRITON_INTERPRET=1 is not set: the interpreter is chosen when triton loads",
        allow_module_level=True,
    )
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from kernels import gpu_cases, norm_cases  # noqa: E402
from lossscale.torch.half_precision.kernels import launch  # noqa: E402

CHECKS = dict(norm_cases.checks("cpu"))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(launch, "TILE", 128)
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 3)
    monkeypatch.setattr(launch, "SUM_TILE", 2)
    monkeypatch.setattr(launch, "FEWEST_PROGRAMS", 2)
    launch.find_tile.cache_clear()
    launch.find_kernels.cache_clear()
    gpu_cases.exact_bfloat16(monkeypatch)


# NumPy warns of what the kernels compute on purpose, with infinities and NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_normalize_as_float64_does(name):
    CHECKS[name]()
