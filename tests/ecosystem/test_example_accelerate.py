"""The example with Accelerate, run as a reader runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate.py"
LINE = re.compile(
    r"(.*?) +accuracy ([\d.]+)% skipped (\d+) scale ([\d,]+) rate ([\d.]+)"
)


def run_example():
    """Return what was printed: the numbers of each run by its name; the rest."""
    finished = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        # Threads of a busy machine wait for each other longer than such layers take.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if finished.returncode:
        raise AssertionError(finished.stderr[-4000:])
    runs, others = {}, []
    for line in finished.stdout.splitlines():
        match = LINE.fullmatch(line)
        if match is None:
            others.append(line)
            continue
        scale = int(match[4].replace(",", ""))
        runs[match[1]] = float(match[2]), int(match[3]), scale, float(match[5])
    return runs, others


def test_a_dynamic_scale_saves_what_float16_alone_loses():
    runs, others = run_example()
    assert ["float32", "float16, no scaling", "float16, dynamic scale"] == list(runs)
    accuracy, skipped, scale, rate = runs["float16, dynamic scale"]
    assert accuracy > 90
    assert 0 < skipped < 30
    assert scale > 1
    # The rate falls from 0.02 to 0 in 300 steps; the skipped ones are still to come.
    assert round(0.02 * skipped / 300, 5) == rate
    assert runs["float32"][0] > 90
    assert (0, 1, 0.0) == runs["float32"][1:]
    # The share of zeros in the test set: a network that always says "0".
    assert (10.8, 0, 1, 0.0) == runs["float16, no scaling"]
    assert ["step 200: nan in 8 layers, skipped"] == others
