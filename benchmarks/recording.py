# SPDX-License-Identifier: Apache-2.0
"""What does recording cost a step, and how long does a report of a long run take?

    python benchmarks/recording.py 10000000 benchmarks/results/recording.csv

Cost: the processor's time of one call, flushes included, as the median of five rounds;
other processes change it less than the time on the wall. Report: a process of its own,
its time and the most memory that it had, with the roll-up that the recorder wrote and
without it.
"""

import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np

import lossscale.numpy as ls
from lossscale import Dynamic
from lossscale.diagnostics import Recorder

CALLS = 50_000
ROUNDS = 5
WIDE_TENSORS, WIDE_STEPS = 5_000, 5_000
NAMES = [f"blocks.{i // 12}.{i % 12}.weight" for i in range(148)]


def cost_of(call, folder):
    """Return the microseconds of one call, closing the file included."""
    times = []
    for round_ in range(ROUNDS):
        path = Path(folder) / f"{round_}.jsonl"
        with Recorder(path, names=NAMES, policy=Dynamic(), writers=()) as recorder:
            start = time.process_time()
            for step in range(1, CALLS + 1):
                call(recorder, step)
            recorder.flush()
            times.append((time.process_time() - start) / CALLS * 1e6)
    return median(times)


def report_of(step):
    return SimpleNamespace(
        index=step,
        scale=65536.0,
        applied=True,
        norm=0.53121,
        clip=1.0,
        amax=0.00213,
        reason=None,
        nonfinite={},
    )


def measure_costs(folder):
    state = ls.init(Dynamic())
    gradients = {"w": np.ones(4, np.float16)}
    _, signal = ls.unscale(gradients, state, measure=("nan", "amax", "norm"))
    calls = {
        "as on_step": lambda recorder, step: recorder(report_of(step)),
        "record()": lambda recorder, _: recorder.record(
            scale=65536.0, applied=True, norm=0.53121, clip=1.0, amax=0.00213, loss=2.31
        ),
        "record_signal()": lambda recorder, _: recorder.record_signal(
            state, signal, loss=2.31, lr=3e-4
        ),
    }
    empty = cost_of(lambda _, step: report_of(step), folder)
    rows = [("making the report itself", empty)]
    for name, call in calls.items():
        rows.append((name, cost_of(call, folder)))
    return rows


def write_run(path, steps):
    """Record a long run: skips, growth, spikes."""
    rng = random.Random(0)
    scale, good = 65536.0, 0
    with Recorder(path, names=NAMES, policy=Dynamic(), writers=()) as recorder:
        for _ in range(steps):
            bad = rng.random() < 1e-3
            recorder.record(
                scale=scale,
                applied=not bad,
                norm=0.5 + rng.random(),
                clip=1.0,
                amax=rng.random() / 100,
                loss=2.0 + rng.random(),
                lr=3e-4,
                nonfinite={rng.choice(NAMES): "inf"} if bad else (),
            )
            good = 0 if bad else good + 1
            if bad:
                scale = max(1.0, scale / 2)
            elif good % 700 == 0:
                scale = min(2.0**24, scale * 2)


def write_wide_run(path):
    """Record a run whose every tensor is NaN now and then: no layer can be named."""
    names = [f"blocks.{i // 12}.{i % 12}.weight" for i in range(WIDE_TENSORS)]
    broken = dict.fromkeys(names, "nan")
    with Recorder(path, names=names, writers=(), alarms=None) as recorder:
        for step in range(1, WIDE_STEPS + 1):
            bad = step % 50 == 0
            recorder.record(
                scale=65536.0,
                applied=not bad,
                cause="nan",
                norm=1.0,
                loss=2.0,
                nonfinite=broken if bad else (),
            )


CHILD = """
import resource, sys, time
start = time.perf_counter()
from lossscale.diagnostics import build_report
page = build_report([sys.argv[1]])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(seconds, peak / 1024, len(page.encode()))
"""


def measure_report(path):
    done = subprocess.run(  # noqa: S603  # our own interpreter
        [sys.executable, "-c", CHILD, str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    return tuple(map(float, done.stdout.split()))


def main(steps, output):
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            ("cost", name, f"{cost:.2f}", "us a step")
            for name, cost in measure_costs(folder)
        ]
        path = Path(folder) / "long.jsonl"
        start = time.perf_counter()
        write_run(path, steps)
        rows.append(("long run", "steps", steps, ""))
        rows.append(
            ("long run", "written in", f"{time.perf_counter() - start:.1f}", "s")
        )
        rows.append(("long run", "file", f"{path.stat().st_size / 1e6:.0f}", "MB"))
        rollup = Path(f"{path}.rollup")
        rows.append(("long run", "roll-up", f"{rollup.stat().st_size / 1e6:.1f}", "MB"))
        for name in ("report", "report without the roll-up"):
            if name != "report":
                rollup.unlink()
            seconds, peak, size = measure_report(path)
            rows.append((name, "time", f"{seconds:.1f}", "s"))
            rows.append((name, "memory", f"{peak:.0f}", "MiB"))
            rows.append((name, "page", f"{size / 1e6:.2f}", "MB"))
        path = Path(folder) / "wide.jsonl"
        write_wide_run(path)
        seconds, peak, _ = measure_report(path)
        name = f"report of {WIDE_STEPS:,} steps".replace(",", "")
        name += f" of which every 50th is NaN in {WIDE_TENSORS} tensors"
        rows.append((name, "time", f"{seconds:.1f}", "s"))
        rows.append((name, "memory", f"{peak:.0f}", "MiB"))
    lines = ["what,which,value,unit"]
    lines += [",".join(map(str, row)) for row in rows]
    lines.append(f"machine,python,{platform.python_version()},")
    lines.append(f"machine,cores,{os.cpu_count()},")
    text = "\n".join(lines) + "\n"
    print(text)
    if output:
        Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000,
        sys.argv[2] if len(sys.argv) > 2 else None,
    )
