"""The recipes, run as a reader runs them, and the numbers that they print."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.limits import HANG_SECONDS

torch = pytest.importorskip("torch", reason="torch is not installed")

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


def printed(name):
    """Return the lines that a recipe prints; raise if it fails or warns."""
    finished = subprocess.run(
        [sys.executable, str(RECIPES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    if finished.returncode or finished.stderr:
        raise AssertionError(finished.stderr[-4000:])
    return finished.stdout.splitlines()


def numbers(pattern, line):
    """Return what a pattern's groups hold, as floats; raise if a line is another."""
    match = re.fullmatch(pattern, line)
    if match is None:
        message = f"{line!r} is not {pattern!r}"
        raise AssertionError(message)
    return [float(group) for group in match.groups()]


def test_a_bad_micro_batch_costs_torch_the_step_and_us_the_micro_batch():
    lines = printed("bad_micro_batch")
    # 8 of 40 steps have a bad micro-batch, and each halves the scale: 2**12 / 2**8.
    assert ["torch's  took 32 of 40 steps, scale 16"] == lines[0:1]
    assert ["ours     took 40 of 40 steps, scale 16"] == lines[2:3]
    away = r"{} weights are ([\d.]+)% away from those without the bad rows"
    (theirs,) = numbers(away.format("torch's "), lines[1])
    (ours,) = numbers(away.format("ours    "), lines[3])
    # float16 alone rounds by 2**-11, which is 0.05 %.
    assert 0.05 > ours
    assert 1.0 < theirs
    assert 4 == len(lines)


def test_two_optimizers_take_a_step_together_or_not_at_all():
    assert [
        "torch's  at the infinite gradient Muon moved, AdamW stayed",
        "torch's  Muon took 10 steps, its schedule 10; AdamW 9, its schedule 10",
        "step_all at the infinite gradient Muon stayed, AdamW stayed",
        "step_all Muon took 9 steps, its schedule 9; AdamW 9, its schedule 9",
    ] == printed("two_optimizers")


def test_a_run_goes_from_torch_to_ours_and_back_without_a_difference():
    lines = printed("resume_from_torch")
    pattern = r"{} scale ([\d.e+]+), (\d+) finite steps, as without: True"
    names = ("torch's ", "ours    ", "torch's ")
    pairs = zip(names, lines[:3], strict=True)
    legs = [numbers(pattern.format(name), line) for name, line in pairs]
    # The scale doubles at the 20th finite step, and every leg has 30 steps: in the
    # second and third, which skip none, the count goes on from where it stood.
    scale, tracker = legs[0]
    for found in legs[1:]:
        scale, tracker = scale * 2 ** ((tracker + 30) // 20), (tracker + 30) % 20
        assert [scale, tracker] == found
    assert 0 < legs[0][1]
    assert [
        "ours counted 30 steps of its own, 0 skipped",
        "weights the same to the bit: True",
    ] == lines[3:]


def test_a_captured_step_skips_by_itself():
    skipped = ["step 5 of 10 was skipped, scale 512", "skipped 1, rate 0.00349"]
    lines = printed("captured_step")
    assert skipped == lines[:2]
    if torch.cuda.is_available():
        assert ["the same in a CUDA graph:", *skipped] == lines[2:5]
        (apart,) = numbers(r"largest difference of a weight: (\S+)", lines[5])
        assert 1e-3 > apart
    else:
        assert ["there is no GPU: no step was captured in a graph"] == lines[2:]


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_an_adapter_learns_in_float32_and_less_well_in_float16():
    lines = printed("lora_float16_base")
    pattern = (
        r"base torch.float16, adapter torch.{}: "
        r"loss ([\d.]+) -> ([\d.]+), (\d+)% of the gradients rounded"
    )
    first, wide, rounded = numbers(pattern.format("float32"), lines[0])
    assert wide < 0.01 * first
    assert 0 == rounded
    refusal = "torch's scaler, float16 adapter: Attempting to unscale FP16 gradients."
    assert refusal == lines[1]
    again, narrow, rounded = numbers(pattern.format("float16"), lines[2])
    assert first == again
    assert wide < narrow < 0.1 * first
    assert 10 < rounded
    assert 3 == len(lines)


@pytest.mark.parametrize(
    "recipe", sorted(RECIPES.glob("*.py")), ids=lambda one: one.stem
)
def test_a_recipe_is_short_and_says_how_to_run_it(recipe):
    text = recipe.read_text(encoding="utf-8")
    assert 80 > len(text.splitlines())
    assert f"    python examples/recipes/{recipe.name}\n" in text
