"""The example of FSDP2, run as a reader runs it, on two ranks."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from helpers.limits import HANG_SECONDS

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_torch_fsdp.py"
LAST = re.compile(r"rank \d: accuracy ([\d.]+)% skipped (\d+) scale=([\d.]+)")

RACE = "terminate called without an active exception"
"""What torch 2.13 says now and then when a process with gloo ends, whatever it did."""


def run_example(ranks):
    """Return what each rank printed, as torchrun would have started them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE)],
            env=os.environ
            | place
            | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = []
    for process in processes:
        output, errors = process.communicate(timeout=HANG_SECONDS)
        at_exit = process.returncode == -signal.SIGABRT and RACE in errors
        if process.returncode and not at_exit:
            raise AssertionError(errors[-4000:])
        printed.append(output.splitlines())
    return printed


def test_both_ranks_learn_and_skip_together():
    first, second = run_example(2)
    assert "rank 0: inf ()" == first[0]
    assert "rank 1: inf ('0.weight',)" == second[0]
    ends = [LAST.fullmatch(lines[-1]).groups() for lines in (first, second)]
    assert ends[0] == ends[1]
    accuracy, skipped, scale = map(float, ends[0])
    assert accuracy > 80
    assert 0 < skipped < 30
    assert scale > 1
