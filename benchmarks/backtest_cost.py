# SPDX-License-Identifier: Apache-2.0
"""What does a backtest of a long record cost, in processor time and memory?

    python benchmarks/backtest_cost.py

A synthetic record of a million steps, whose magnitudes are drawn from a distribution,
and policies of both kinds: presets, whose steps are compiled, and policies that read
magnitudes, which take their steps one by one in Python. Those run over the first 50,000
steps. Every row is a process of its own, so that its peak of memory is its own. Writes
benchmarks/results/backtest_cost.csv.
"""

import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import numpy as np

import lossscale.numpy as ls
from lossscale import Dynamic, Signal
from lossscale.cli.policies import parse_policy
from lossscale.diagnostics import Recorder, backtest

CASES = (
    (1_000_000, ("fixed:1024",)),
    (1_000_000, ("torch",)),
    (1_000_000, ("torch", "megatron", "deepspeed", "keras")),
    (50_000, ("fixed:1024",)),
    (50_000, ("headroom",)),
    (50_000, ("log_max",)),
)


def record(path, steps):
    """Record a synthetic run; its policy is torch's."""
    magnitudes = np.exp(np.random.default_rng(0).normal(-3.0, 0.7, steps))
    policy = Dynamic()
    state = ls.init(policy)
    scale, until_growth = float(state.scale), 0
    with Recorder(path, policy=policy, writers=(), alarms=None) as recorder:
        for amax in magnitudes.tolist():
            finite = amax * scale <= 65504.0
            recorder.record(
                scale=scale,
                applied=finite,
                norm=1.0,
                amax=amax if finite else None,
                loss=1.0,
                lr=1e-3,
            )
            # The rule itself where something happens: a step of it takes 50 µs.
            until_growth += 1
            if not finite or until_growth == policy.growth_interval:
                state = state._replace(good_steps=np.int32(until_growth - 1))
                state = ls.update(policy, state, Signal(np.bool_(finite)))
                scale, until_growth = float(state.scale), 0


def measure(path, texts):
    """Print what a backtest costs this process."""
    start = time.process_time()
    found = backtest(Path(path), {text: parse_policy(text) for text in texts})
    row = {
        "steps": found.steps.size,
        "policies": " ".join(texts),
        "processor_seconds": round(time.process_time() - start, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(row))


def main():
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for steps, texts in CASES:
            path = Path(folder) / f"{steps}.jsonl"
            if not path.exists():
                record(path, steps)
            command = [sys.executable, __file__, str(path), *texts]
            printed = subprocess.run(  # noqa: S603  # this file
                command, check=True, stdout=subprocess.PIPE
            )
            rows.append(json.loads(printed.stdout))
            print(rows[-1], flush=True)
    described = machine.describe("numpy", "numba")
    with (machine.RESULTS / "backtest_cost.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *described])
        writer.writeheader()
        writer.writerows({**row, **described} for row in rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], sys.argv[2:])
    else:
        main()
