"""The rule compiles for GPUs, without one, into straight-line code."""

import re
import warnings
from itertools import product

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lossscale.core.policies import Settings, Switches  # noqa: E402

POINTERS = {"scale": "*fp32", "good": "*i32", "bad": "*i32", "finite": "*i8"}


def ptx(capability, switches, *, exact_division=False):
    """Compile the test kernel and return its PTX."""
    from kernels.rule_kernel import rule_kernel

    numbers = dict.fromkeys(Settings._fields, "i32")
    for name in ("growth_factor", "backoff", "min_scale", "max_scale"):
        numbers[name] = "fp32"
    signature = {f"{name}_pointer": kind for name, kind in POINTERS.items()}
    signature |= numbers | {"count": "i32"}
    constants = switches._asdict() | {"exact_division": exact_division, "block": 32}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=rule_kernel, signature=signature, constexprs=constants)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton announces a changing default
        return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm[
            "ptx"
        ]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "switches", [Switches(*flags) for flags in product((False, True), repeat=5)]
)
def test_it_compiles_into_straight_line_code(capability, switches):
    text = ptx(capability, switches)
    assert f".target sm_{capability}" in text
    # A branch may only skip the masked memory accesses; the rule itself has none.
    assert not re.search(r"^\s*(@%p\d+\s+)?bra", text, re.MULTILINE)
    assert ("div." in text) == switches.backoff_divides


def test_division_is_exact_when_the_divisor_is_widened_to_float64():
    switches = Switches(True, False, False, False, True)
    assert "div.rn.f64" in ptx(90, switches, exact_division=True)
    # What a kernel author must know: in float32 Triton's `/` is an approximation.
    assert "div.rn" not in ptx(90, switches)
