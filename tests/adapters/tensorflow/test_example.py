"""The example, run as a reader runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.limits import HANG_SECONDS

pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_tensorflow.py"
LINE = re.compile(r"(.*?) +accuracy ([\d.]+)% skipped (\d+) scale ([\d,]+)")


def run_example():
    """Return accuracy in percent, skipped steps and scale of every run, by name."""
    finished = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    if finished.returncode:
        raise AssertionError(finished.stderr[-4000:])
    found = [LINE.fullmatch(line) for line in finished.stdout.splitlines()]
    return {
        match[1]: (float(match[2]), int(match[3]), int(match[4].replace(",", "")))
        for match in found
    }


def test_a_dynamic_scale_saves_what_float16_alone_loses():
    runs = run_example()
    assert ["float32", "float16, no scaling", "float16, dynamic scale"] == list(runs)
    accuracy, skipped, scale = runs["float16, dynamic scale"]
    assert accuracy > 90
    assert 0 < skipped < 30
    assert scale > 1
    assert runs["float32"][0] > 90
    assert (0, 1) == runs["float32"][1:]
    # The share of zeros in the test set: a network that always says "0".
    assert (10.8, 0, 1) == runs["float16, no scaling"]
