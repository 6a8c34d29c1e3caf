"""MultiWorkerMirroredStrategy: two real processes on the loopback interface."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.limits import HANG_SECONDS

pytest.importorskip("tensorflow", reason="tensorflow is not installed")

WORKER = Path(__file__).parent / "worker.py"


def free_ports(count):
    """Return ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def run_workers(count=2):
    """Run the training of worker.py in that many processes; return what each saw."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]}
    processes = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        settings = {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
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


@pytest.fixture(scope="module")
def seen():
    return run_workers()


# NaN in: no worker, the second, none, none, the first.
# Momentum 0.5 makes steps of 1, 1.5 and 1.75; a skipped step leaves no trace.
EXPECTED = [[9.0, 8.0], [9.0, 4.0], [7.5, 4.0], [5.75, 8.0], [5.75, 4.0]]


@pytest.mark.parametrize("kind", ["v1", "keras 3", "tf_keras"])
def test_a_nan_on_one_worker_is_skipped_on_both(seen, kind):
    for worker in seen:
        assert EXPECTED == worker[kind]


def test_an_update_across_replicas_hears_all_workers(seen):
    for worker in seen:
        assert [[16.0, True], [8.0, False], [16.0, True]] == worker["update"]


def test_a_sum_over_workers_that_would_overflow_is_skipped(seen):
    for worker in seen:
        assert [1.0, 8.0] == worker["sum"]
