"""The optimizers' kernels compile for GPUs, without one."""

import re

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip(
        "TRITON_INTERPRET is set: the interpreter does not compile",
        allow_module_level=True,
    )

from kernels.test_kernels_compile import ptx  # noqa: E402
from lossscale.torch.optim.kernels import adam, sgd, tables  # noqa: E402

TABLES = {
    "pointers": "*i64",
    "grads": "*i64",
    "counts": "*i64",
    "kinds": "*i32",
    "starts": "*i32",
    "chunk_tensors": "*i32",
}
ADAM = TABLES | {"scalars": "*fp32", "found_inf": "*fp32", "sums": "*fp32"}
SGD = TABLES | {
    "groups": "*i32",
    "settings": "*fp64",
    "grad_scale": "*fp32",
    "found_inf": "*fp32",
    "sums": "*fp32",
}
MEASURED = {"sums": "*fp64"}
PREPARE = {
    "settings": "*fp64",
    "groups": "*i32",
    "steps": "*fp32",
    "grads": "*i64",
    "grad_scale": "*fp32",
    "found_inf": "*fp32",
    "scalars": "*fp32",
    "tensors": "i32",
}
PLAIN = (tl.float32, tl.float32, tl.float32, False, False)
MASTERS = (tl.float16, tl.float16, tl.float32, True, False)
SUMS = (tl.float16, tl.float32, tl.float32, True, False)
ADAM_KINDS = {
    "float32": (PLAIN, PLAIN),
    "masters": (MASTERS, MASTERS),
    "masters and float32": (MASTERS, PLAIN),
    "float32 sums": (SUMS, SUMS),
    "bfloat16 moments": ((tl.float32, tl.float32, tl.bfloat16, False, True),) * 2,
    "bfloat16": ((tl.bfloat16, tl.bfloat16, tl.bfloat16, False, False),) * 2,
}


def compile_adam(
    kinds,
    capability=90,
    *,
    aligned=True,
    write_back=False,
    measure=False,
    stochastic=False,
):
    first, second = ADAM_KINDS[kinds]
    names = ("dtype", "grad_dtype", "moments", "master", "amsgrad")
    constants = dict(zip(names, first, strict=True))
    constants |= {
        f"other_{name}": value for name, value in zip(names, second, strict=True)
    }
    return ptx(
        adam.apply_adam,
        ADAM | (MEASURED if measure else {}),
        capability,
        mixed=first != second,
        stochastic=stochastic,
        write_back=write_back,
        aligned=aligned,
        block=tables.BLOCK,
        measure=measure,
        **constants,
    )


@pytest.mark.parametrize("kinds", ADAM_KINDS)
@pytest.mark.parametrize("capability", [80, 90])
def test_an_update_of_adam_compiles(kinds, capability):
    text = compile_adam(kinds, capability, write_back=capability == 80)
    assert "div.rn.f32" in text
    assert "sqrt.rn.f32" in text
    assert not re.search(r"div\.(full|approx)|sqrt\.approx", text)


@pytest.mark.parametrize("kinds", ["bfloat16 moments", "bfloat16"])
def test_an_update_that_rounds_stochastically_compiles(kinds):
    text = compile_adam(kinds, stochastic=True)
    assert "mul.lo.s32" in text
    assert "mul.lo.s32" not in compile_adam(kinds)
    assert not re.search(r"(ld|st)\.shared|bar\.sync", text)


def test_an_aligned_update_reads_and_writes_128_bits_at_a_time():
    per_thread = tables.BLOCK // (128 * 4)
    aligned = compile_adam("float32")
    assert 4 * per_thread <= len(re.findall(r"ld\.global\.v4\.b32", aligned))
    assert 3 * per_thread <= len(re.findall(r"st\.global\.v4\.b32", aligned))
    assert not re.search(r"ld\.global\.v4\.b32", compile_adam("float32", aligned=False))


@pytest.mark.parametrize("kinds", ADAM_KINDS)
def test_an_aligned_update_exchanges_nothing_between_threads(kinds):
    # Every thread reads, computes and writes the same elements of all tensors.
    assert not re.search(r"(ld|st)\.shared|bar\.sync", compile_adam(kinds))


def test_step_counts_and_bias_corrections_compile():
    text = ptx(adam.prepare_adam, PREPARE, 90, block=tables.ROWS)
    assert "div.rn.f64" in text
    assert "sqrt.rn.f64" in text


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("master", [False, True])
def test_an_update_of_sgd_compiles(momentum, master):
    compile_sgd(momentum, master)


def compile_sgd(momentum, master, *, measure=False):
    return ptx(
        sgd.apply_sgd,
        SGD | (MEASURED if measure else {}),
        90,
        dtype=tl.float16,
        grad_dtype=tl.float16,
        buffer_dtype=tl.float32 if master else tl.float16,
        master=master,
        momentum=momentum,
        other_dtype=tl.float32,
        other_grad_dtype=tl.float32,
        other_buffer_dtype=tl.float32,
        other_master=False,
        other_momentum=momentum,
        mixed=True,
        write_back=False,
        aligned=True,
        block=tables.BLOCK,
        measure=measure,
    )


def float64_stores(text):
    """Return how many stores of the statistics of a chunk there are."""
    return len(re.findall(r"st\.global\.b64", text))


@pytest.mark.parametrize("kinds", ADAM_KINDS)
def test_an_update_of_adam_that_measures_compiles(kinds):
    text = compile_adam(kinds, measure=True)
    assert "fma.rn.f64" in text
    # Three numbers for each variant of the update: a full chunk or not, of each kind.
    variants = 4 if kinds == "masters and float32" else 2
    assert 3 * variants == float64_stores(text)
    assert not re.search(r"div\.(full|approx)|sqrt\.approx", text)


@pytest.mark.parametrize("master", [False, True])
def test_an_update_of_sgd_that_measures_compiles(master):
    assert 12 == float64_stores(compile_sgd(True, master, measure=True))


@pytest.mark.parametrize("kinds", ADAM_KINDS)
def test_an_update_that_does_not_measure_computes_nothing_in_float64(kinds):
    assert ".f64" not in compile_adam(kinds)
