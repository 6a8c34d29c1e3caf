"""The example for Lightning, run as a reader runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("numpy", reason="numpy is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning.py"
LINE = re.compile(r"(.*?) +accuracy ([\d.]+)% skipped (\d+) scale ([\d,]+)")


def run_example(folder):
    """Return what was printed: accuracy, skipped steps and scale by name; the rest."""
    finished = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
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
        runs[match[1]] = float(match[2]), int(match[3]), scale
    return runs, others


def test_a_dynamic_scale_saves_what_float16_alone_loses(tmp_path):
    runs, others = run_example(tmp_path)
    assert ["float32", "float16, no scaling", "float16, dynamic scale"] == list(runs)
    accuracy, skipped, scale = runs["float16, dynamic scale"]
    assert accuracy > 90
    assert 0 < skipped < 30
    assert scale > 1
    assert runs["float32"][0] > 90
    assert (0, 1) == runs["float32"][1:]
    # The share of zeros in the test set: a network that always says "0".
    assert (10.8, 0, 1) == runs["float16, no scaling"]
    assert ["step 200: nan in 8 layers, skipped"] == others
    assert not [*tmp_path.iterdir()]  # Lightning leaves no folder behind
