"""The kernels in Triton's interpreter, against NumPy and torch."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "TRITON_INTERPRET=1 is not set: the interpreter is chosen when triton loads",
        allow_module_level=True,
    )
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from kernels import gpu_cases  # noqa: E402
from lossscale.torch.inspection import kernel_backend  # noqa: E402
from lossscale.torch.inspection.groups import (  # noqa: E402
    GradientGroups,
    GradientScale,
)
from lossscale.torch.inspection.kernels import launch  # noqa: E402
from lossscale.torch.inspection.request import InspectionRequest  # noqa: E402
from lossscale.torch.inspection.summary import FACTOR, NORM  # noqa: E402

BLOCK, LOOPS, LANES = 64, 2, 16
CASES = gpu_cases.cases("cpu", chunk=BLOCK * LOOPS, many=40)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    gpu_cases.small_chunks(monkeypatch, BLOCK, LOOPS, LANES)
    gpu_cases.exact_bfloat16(monkeypatch)


def parameters(cases):
    """Return pytest's parameters."""
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", parameters(CASES))
def test_a_summary_and_what_is_written_are_what_numpy_says(case):
    gpu_cases.check(case)


def test_one_launcher_serves_gradients_that_change_and_move():
    gpu_cases.check_reuse("cpu")


def tables_of(gradients):
    return launch.Tables(gradients, [1.0] * len(gradients))


def test_chunks_are_as_small_as_the_constants_say_when_the_tables_are_made():
    tables = tables_of([torch.zeros(size) for size in (0, 127, 128, 129, 1000)])
    assert [0, 0, 1, 2, 4, 12] == tables.starts.tolist()
    assert [1, 2, 3, 3, *[4] * 8] == tables.chunk_tensors.tolist()
    assert [0, 0, 0, 1, *range(8)] == tables.chunk_numbers.tolist()


def test_tables_of_every_number_of_tensors_and_chunks_are_aligned_and_whole():
    for count in range(1, 6):
        for size in (0, 1, 129):
            tables = tables_of([torch.zeros(size)] * count)
            chunks = count * -(-size // (BLOCK * LOOPS))
            assert chunks == tables.chunks == len(tables.chunk_numbers)
            assert count + 1 == len(tables.starts)
            assert [size] * count == tables.counts.tolist()
            assert 0 == tables.limits.data_ptr() % 8


def test_alignment_is_checked_again_whenever_the_gradients_move():
    memory = torch.zeros(40)
    tables = tables_of([memory[:8], memory[8:16]])
    seen = []
    for first, second in ((0, 8), (0, 9), (1, 12), (4, 20)):
        grads = [memory[first : first + 8], memory[second : second + 8]]
        tables.set_addresses(grads, None)
        seen.append(bool(tables.is_aligned))
    assert [True, False, False, True] == seen


def test_addresses_are_copied_when_their_version_is_another_one():
    memory = torch.zeros(40)
    tables = tables_of([memory[:8], memory[8:16]])
    for version, first, expected in ((1, 0, 0), (1, 16, 0), (2, 16, 16), (None, 0, 0)):
        tables.set_addresses([memory[first:][:8], memory[first + 8 :][:8]], version)
        assert memory[expected:].data_ptr() == tables.pointers[0].item()


@pytest.mark.parametrize("write", [False, True])
def test_a_gradient_with_gaps_goes_the_other_way_and_counts_in_the_same_summary(write):
    gap = torch.arange(40.0)[::2]
    gradients = [torch.full((5,), 3.0), gap, torch.full((3,), -4.0)]
    want = gpu_cases.Case("gaps", lambda: gradients, scale=3.0)
    expected = gpu_cases.expected(want, [g.clone() for g in gradients])
    groups = GradientGroups(gradients, [])
    assert [True, False] == [group.kernels is not None for group in groups.groups]
    request = InspectionRequest(unscale_in_place=write, measure_norm=True)
    gradient_scale = GradientScale(torch.tensor(3.0))
    summary, found = groups.measure(gradients, gradient_scale, request)
    assert [0.0] == [flag.item() for flag in found.values()]
    assert pytest.approx(expected.norm, rel=1e-6) == summary.slot(NORM).item()
    if not write:
        groups.multiply_(gradients, summary.slot(FACTOR))
    third = torch.tensor(1.0).div(3.0)
    assert torch.equal(torch.arange(40.0)[::2] * third, gap)
    assert torch.equal(torch.full((5,), 3.0) * third, gradients[0])


def test_dense_is_what_fills_a_stretch_of_memory_in_any_order():
    assert kernel_backend.can_read(torch.zeros(3, 4).t())
    assert kernel_backend.can_read(torch.zeros(2, 3, 4).permute(2, 0, 1))
    assert kernel_backend.can_read(torch.zeros(3, 4)[:, :0])
    assert not kernel_backend.can_read(torch.zeros(3, 4)[:, 1:])
    assert not kernel_backend.can_read(torch.zeros(1).expand(4))
    assert not kernel_backend.can_read(torch.zeros(3, dtype=torch.complex64))
    assert not kernel_backend.can_read(torch.zeros(3).to_sparse())
    assert not kernel_backend.can_read(torch._neg_view(torch.zeros(3)))


@pytest.mark.parametrize("name", gpu_cases.policies())
def test_the_update_takes_the_steps_of_numpys_update(name):
    gpu_cases.check_policy("cpu", name, gpu_cases.policies()[name])


@pytest.mark.parametrize("numbers", gpu_cases.TORCHS_NUMBERS)
def test_with_torchs_arguments_the_update_takes_torchs_steps(numbers):
    gpu_cases.check_wide("cpu", numbers)
