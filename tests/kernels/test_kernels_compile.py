"""The kernels compile for GPUs, without one."""

import re
import warnings

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lossscale.core.policies import Switches  # noqa: E402
from lossscale.core.portable import KINDS  # noqa: E402
from lossscale.torch.inspection.kernels import (  # noqa: E402
    launch,
    policy_update,
    scale_update,
    statistics,
    summarize,
)
from lossscale.torch.inspection.kernels import read as reading  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip(
        "TRITON_INTERPRET is set: the interpreter does not compile",
        allow_module_level=True,
    )

DTYPES = (tl.float32, tl.float16, tl.bfloat16, tl.float64)
LISTS = {
    "pointers": "*i64",
    "counts": "*i64",
    "kinds": "*i32",
    "chunk_tensors": "*i32",
    "chunk_numbers": "*i32",
}
READ = LISTS | {"scale_pointer": "*fp32", "sums": "*fp64", "amaxes": "*fp64"}
MULTIPLY = LISTS | {"factor_pointer": "*fp32"}
DECIDE = {
    "starts": "*i32",
    "limits": "*fp64",
    "bounds": "*fp64",
    "sums": "*fp64",
    "amaxes": "*fp64",
    "tensor_sums": "*fp64",
    "tensor_amaxes": "*fp64",
    "scale_pointer": "*fp32",
    "summary": "*fp32",
    "finished": "*i32",
    "tensors": "i32",
    "max_norm": "fp32",
}
UPDATE = {
    "scale_pointer": "*fp32",
    "good_pointer": "*i32",
    "bad_pointer": "*i32",
    "counters": "*i32",
    "flags": "*fp32",
    "held_by_loss_pointer": "*fp32",
    "loss_pointer": "*fp32",
    "summary": "*fp32",
    "copy": "*fp32",
    "length": "i32",
    "settings": "*fp64",
    "growth_threshold": "i32",
    "good_after_growth": "i32",
    "hysteresis": "i32",
}


def ptx(kernel, arguments, capability, warps=4, *, fuses=True, **constants):
    """Compile a kernel and return its PTX."""
    signature = arguments | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton announces a changing default
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": warps, "enable_fp_fusion": fuses},
        )
    text = compiled.asm["ptx"]
    assert f".target sm_{capability}" in text
    return text


def read(capability=90, *, dtype=tl.float32, **switches):
    chosen = dict.fromkeys(("mixed", "inverted", "write"), False) | {"aligned": True}
    chosen |= switches
    sizes = {"block": launch.BLOCK, "loops": launch.LOOPS}
    return ptx(
        reading.read, READ, capability, launch.WARPS, dtype=dtype, **chosen, **sizes
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("write", [False, True])
def test_a_read_of_every_dtype_compiles(dtype, write):
    text = read(dtype=dtype, write=write)
    assert write == bool(re.search(r"st\.global\.v\d", text))


@pytest.mark.parametrize(
    ("capability", "switches"),
    [
        (80, {}),
        (80, {"write": True, "aligned": False}),
        (90, {"write": True, "inverted": True}),
        (80, {"mixed": True, "write": True}),
        (90, {"mixed": True, "write": True, "aligned": False}),
    ],
    ids=str,
)
def test_a_read_of_every_other_kind_compiles(capability, switches):
    read(capability, **switches)


def test_an_aligned_read_loads_128_bits_at_a_time():
    wide = re.compile(r"ld\.global\.v4\.b32")
    blocks = launch.BLOCK * launch.LOOPS // (launch.WARPS * 32 * 4)
    assert blocks <= len(wide.findall(read()))
    assert blocks // 2 <= len(wide.findall(read(dtype=tl.float16)))
    assert not wide.search(read(aligned=False))


def test_only_what_is_written_is_scaled_and_only_there_the_scale_is_inverted():
    division = re.compile(r"div\.(rn|full)\S*\.f64|rcp\.\S*f64")
    assert not division.search(read(inverted=True))
    assert division.search(read(write=True))


@pytest.mark.parametrize(
    ("capability", "dtype", "mixed", "aligned"),
    [
        (80, tl.float32, False, True),
        (90, tl.bfloat16, False, True),
        (80, tl.float64, False, False),
        (90, tl.float32, True, True),
    ],
    ids=str,
)
def test_a_multiplication_compiles(capability, dtype, mixed, aligned):
    text = ptx(
        reading.multiply,
        MULTIPLY,
        capability,
        launch.WARPS,
        dtype=dtype,
        mixed=mixed,
        aligned=aligned,
        block=launch.BLOCK,
        loops=launch.LOOPS,
    )
    assert aligned == ("st.global.v4" in text)


@pytest.mark.parametrize(
    ("capability", "euclid", "clips", "inverted"),
    [(80, True, True, False), (90, False, True, True), (90, True, False, False)],
)
def test_a_decision_compiles(capability, euclid, clips, inverted):
    text = ptx(
        summarize.summarize,
        DECIDE,
        capability,
        euclid=euclid,
        clips=clips,
        compares_with_bounds=not inverted,
        as_grad_scale=clips,
        inverted=inverted,
    )
    # What other programs wrote is read only after their counter says so.
    assert re.search(r"atom\.\S*acq_rel\S*\.add", text)
    assert re.search(r"ld\.global\.cg", text)


# All switches of the rule, and with them in turn the others: half a minute for all.
@pytest.mark.parametrize("number", range(32))
def test_an_update_compiles_into_straight_line_code(number):
    chosen = Switches(*(bool(number >> bit & 1) for bit in range(5)))
    capability = 90 if (number * 5) // 3 % 2 else 80
    wide, check_loss = bool(number // 3 % 2), bool(number // 7 % 2)
    text = ptx(
        scale_update.update_scale,
        UPDATE,
        capability,
        skipped_at=0,
        too_large_at=8,
        multiplies_in_float64=wide,
        may_be_held_by_loss=check_loss,
        notes_loss=check_loss,
        copies=False,
        moves=True,
        **chosen._asdict(),
    )
    assert not re.search(r"^\s*(@%p\d+\s+)?bra", text, re.MULTILINE)
    # Where it divides, it does so in float64, which is exact.
    assert chosen.backoff_divides == ("div.rn.f64" in text)
    assert "div.full.f32" not in text


def compile_update_of_a_fixed_scale(**constants):
    return ptx(
        scale_update.update_scale,
        UPDATE,
        90,
        skipped_at=0,
        too_large_at=8,
        multiplies_in_float64=False,
        may_be_held_by_loss=False,
        **constants,
        moves=False,
        **dict.fromkeys(Switches._fields, False),
    )


def test_an_update_of_a_fixed_scale_leaves_the_scale_alone():
    text = compile_update_of_a_fixed_scale(notes_loss=False, copies=False)
    assert 3 == len(re.findall(r"st\.global", text))


def test_an_update_that_copies_the_summary_writes_it_after_the_loss():
    text = compile_update_of_a_fixed_scale(notes_loss=True, copies=True)
    before, barrier, after = text.partition("bar.sync")
    assert barrier
    assert 4 == len(re.findall(r"st\.global", before))  # three counters and the loss
    assert re.search(r"ld\.global", after)
    assert re.search(r"st\.global", after)


def test_subnormal_numbers_are_kept_and_quotients_are_exact():
    text = read(write=True)
    assert re.search(r"mul(\.rn)?\.f32", text)
    assert ".ftz" not in text
    assert "div.full" not in text
    assert "div.approx" not in text


COUNT = {"pointers": "*i64", "sizes": "*i64", "kinds": "*i64", "rows": "*i64"}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "mixed", "first", "exponents"),
    [
        (tl.float16, False, -24, 40),
        (tl.bfloat16, False, -149, 277),
        (tl.float32, False, -149, 277),
        (tl.float32, True, -149, 277),
    ],
    ids=str,
)
def test_a_count_by_exponent_compiles(capability, dtype, mixed, first, exponents):
    text = ptx(
        statistics._count,
        COUNT,
        capability,
        dtype=dtype,
        mixed=mixed,
        first=first,
        exponents=exponents,
        bins=triton.next_power_of_2(exponents + 3),
        block=2048,
    )
    # Counts and the largest magnitude are the only writes, and no program waits.
    assert "st.global" not in text
    assert ".ftz" not in text
    assert re.search(r"(atom|red)\.\S*add\.\S*64", text)


@pytest.mark.parametrize("policy_class", KINDS.values())
@pytest.mark.parametrize("has_measurements", [False, True])
def test_a_policy_compiles_into_straight_line_code_that_rounds_as_torch_does(
    policy_class, has_measurements
):
    policy = policy_class()
    kernel = policy_update.make_kernel(
        policy, has_loss=True, has_measurements=has_measurements
    )
    kinds = {"good_steps": "*i32", "bad_steps": "*i32"}
    fields = policy.init()._fields
    arguments = {f"{name}_pointer": kinds.get(name, "*fp32") for name in fields}
    arguments |= {"counters": "*i32"}
    arguments |= dict.fromkeys(
        ("flags", "held_by_loss_pointer", "loss_pointer", "summary", "measured"),
        "*fp32",
    )
    constants = {"skipped_at": 0, "too_large_at": 5, "notes_loss": True}
    text = ptx(kernel, arguments, 80, fuses=False, **constants)
    # No branch, no product fused with a sum, no approximated quotient.
    assert not re.search(r"\bbra\b|fma\.|div\.(full|approx)", text)
