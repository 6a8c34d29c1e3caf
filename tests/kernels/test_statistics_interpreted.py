"""The kernel that takes tensor statistics, in Triton's interpreter, against NumPy."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "TRITON_INTERPRET=1 is not set: the interpreter is chosen when triton loads",
        allow_module_level=True,
    )
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from helpers.statistics import assert_measured_as_numpy_does  # noqa: E402

from kernels import gpu_cases, statistics_cases  # noqa: E402
from lossscale.torch import GradScaler  # noqa: E402
from lossscale.torch.inspection.kernels import statistics  # noqa: E402


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 64)
    monkeypatch.setattr(statistics, "_PARTS", 3)
    gpu_cases.exact_bfloat16(monkeypatch)


@pytest.mark.parametrize("dtype", statistics_cases.DTYPES, ids=str)
def test_the_statistics_of_a_dtype_are_those_of_numpy(dtype):
    statistics_cases.check_dtype(dtype, "cpu")


def test_the_statistics_of_several_dtypes_are_those_of_numpy():
    statistics_cases.check_mixed("cpu")


def test_a_scaler_whose_state_is_on_a_device_reports_them():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    found = []

    class Asked:
        def wants_statistics(self, step):
            return step == 1

        def __call__(self, report):
            found.append(report.statistics)

    scaler = GradScaler("cpu", on_step=Asked(), names=[("w", weight)])
    for _ in range(2):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor([0.0, 2.0, -0.5])
        scaler.step(optimizer)
        scaler.update()
    assert_measured_as_numpy_does(found[0], {"w": torch.tensor([0.0, 2.0, -0.5])})
    assert [None] == found[1:]
