"""Two real processes, each with two devices, joined by jax.distributed on the CPU."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.limits import HANG_SECONDS

pytest.importorskip("jax", reason="jax is not installed")

WORKER = Path(__file__).parent / "worker.py"


def free_port():
    """Return a port that was free a moment ago."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return result.getsockname()[1]


def run_workers(count):
    """Run worker.py in that many processes; return what each of them saw."""
    settings = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, (rank, count, port, HANG_SECONDS))],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    seen = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=HANG_SECONDS)
            if process.returncode:
                raise AssertionError(errors[-4000:])
            seen.append(json.loads(output.strip().splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return seen


def test_two_processes_skip_together_and_keep_one_scale_and_one_weight():
    first, second = run_workers(2)
    assert first == second
    assert (2, 4) == (first["processes"], first["devices"])
    # The mean of 1 and 2, over 4 weights. Step 1 overflows in the first process, step
    # 2 in the second.
    once, twice = [-0.375] * 4, [-0.75] * 4
    expected = [
        [True, 1024.0, once],
        [False, 512.0, once],
        [False, 256.0, once],
        [True, 256.0, twice],
    ]
    assert expected == first["global"]
    assert expected == first["mapped"]
