"""The kernels that normalize rows compile for GPUs, without one."""

import re

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip(
        "TRITON_INTERPRET is set: the interpreter does not compile",
        allow_module_level=True,
    )

from kernels.test_kernels_compile import ptx  # noqa: E402
from lossscale.torch.half_precision.kernels import launch, norms  # noqa: E402

FORWARD = {
    "inputs": "*fp16",
    "weight": "*fp32",
    "bias": "*fp32",
    "outputs": "*fp16",
    "statistics": "*fp32",
    "rows": "i32",
}
BACKWARD = {
    "inputs": "*fp16",
    "weight": "*fp32",
    "output_grads": "*fp16",
    "statistics": "*fp32",
    "input_grads": "*fp16",
    "sums": "*fp32",
    "rows": "i32",
}
SUMS = {
    "sums": "*fp32",
    "first_grad": "*fp32",
    "second_grad": "*fp32",
    "programs": "i32",
}


def shape_of(columns):
    width = 1 << (columns - 1).bit_length()
    tile = launch.find_tile(columns, 8192)
    return {"dtype": tl.float16, "columns": columns, "width": width, "tile": tile}


@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.parametrize("columns", [7, 768, 5000, 16384])
@pytest.mark.parametrize("capability", [80, 90])
def test_both_passes_compile(capability, columns, has_mean):
    warps = launch.warps_of(columns)
    options = shape_of(columns) | {"has_mean": has_mean, "has_weight": True}
    forward = {"epsilon": 1e-5, "has_bias": has_mean}
    text = ptx(norms.normalize, FORWARD, capability, warps, **options, **forward)
    assert "sqrt.rn.f32" in text
    assert not re.search(r"div\.(full|approx)|sqrt\.approx", text)
    options |= {"wants_weight": True, "wants_bias": has_mean}
    text = ptx(norms.normalize_backward, BACKWARD, capability, warps, **options)
    assert not re.search(r"div\.(full|approx)", text)
    assert ".local" not in text  # what does not fit into registers


def test_the_sums_of_programs_compile_without_atomics():
    # The order of an atomic sum differs from run to run.
    sizes = {"tile": launch.SUM_TILE, "width": launch.SUM_WIDTH}
    text = ptx(norms.add_sums, SUMS, 90, columns=768, kinds=2, **sizes)
    assert not re.search(r"\b(atom|red)\.", text)


@pytest.mark.parametrize(
    ("columns", "count", "tile"),
    [(768, 8192, 4), (256, 8192, 16), (256, 128, 4), (256, 5, 1), (8192, 9999, 1)],
)
def test_few_rows_are_divided_among_more_programs(columns, count, tile):
    assert tile == launch.find_tile(columns, count)
