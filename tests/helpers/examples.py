"""Runs an example as a reader runs it, and reads what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.limits import HANG_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = re.compile(
    r"(.*?) +accuracy ([\d.]+)% skipped (\d+) scale ([\d,]+)(?: rate ([\d.]+))?"
)


def run_example(name, folder=None):
    """Return the numbers of each run by its name, and the other lines.

    The numbers are accuracy, skipped steps and scale; the learning rate where one is
    printed.
    """
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        # Threads of a busy machine wait for each other longer than such layers take.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
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
        numbers = float(match[2]), int(match[3]), int(match[4].replace(",", ""))
        runs[match[1]] = numbers if match[5] is None else (*numbers, float(match[5]))
    return runs, others


def check_the_story(runs):
    """Raise unless float16 learns with a scale, and without one does not."""
    assert ["float32", "float16, no scaling", "float16, dynamic scale"] == list(runs)
    accuracy, skipped, scale, *_ = runs["float16, dynamic scale"]
    assert accuracy > 90
    assert 0 < skipped < 30
    assert scale > 1
    assert runs["float32"][0] > 90
    assert (0, 1) == runs["float32"][1:3]
    # The share of zeros in the test set: a network that always says "0".
    assert (10.8, 0, 1) == runs["float16, no scaling"][:3]
