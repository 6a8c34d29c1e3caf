# SPDX-License-Identifier: Apache-2.0
"""How long do a million steps of a hundred policies take, and how much is compiling?

Times the command as a person runs it (start, imports and compilation included) and the
function inside one process, for several rates of overflow, beside the same steps taken
one by one through `lossscale.numpy`. Writes results/simulate.csv.
"""

import csv
import subprocess
import sys
import time

import numpy as np
from machine import RESULTS, describe

from lossscale import Dynamic, presets
from lossscale.diagnostics import simulate
from lossscale.diagnostics.simulation import _one_by_one

STEPS, POLICIES = 1_000_000, 100
RATES = (0.0005, 0.01, 0.5)
REPEATS = 3
SLOW_STEPS = 20_000


def hundred() -> list[Dynamic]:
    """Every preset, and sweeps of interval and hysteresis."""
    chosen = [presets.get(name) for name in presets.PRESETS]
    for place in range(POLICIES - len(chosen)):
        interval, hysteresis = 50 + 40 * place, 1 + place % 3
        chosen.append(Dynamic(growth_interval=interval, hysteresis=hysteresis))
    return chosen


def command_seconds() -> float:
    """Time `lossscale simulate` for a hundred policies, as a process."""
    sweep = f"growth_interval=50:4000:{POLICIES}"
    command = [sys.executable, "-m", "lossscale", "simulate", "-p", "torch"]
    command += ["--sweep", sweep, "--steps", str(STEPS), "--rate", "0.001", "--json"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    return time.perf_counter() - start


def main() -> None:
    rows = [("command", 0.001, n, command_seconds(), "") for n in range(REPEATS)]
    simulate([Dynamic()], np.ones(10, np.bool_))  # compile
    policies = hundred()
    for rate in RATES:
        flags = np.random.default_rng(0).random(STEPS) >= rate
        start = time.perf_counter()
        _one_by_one(Dynamic(), flags[:SLOW_STEPS])
        slow = (time.perf_counter() - start) / SLOW_STEPS * STEPS * POLICIES
        for repeat in range(REPEATS):
            start = time.perf_counter()
            simulate(policies, flags)
            seconds = time.perf_counter() - start
            rows.append(("function", rate, repeat, seconds, f"{slow / seconds:.0f}"))
    facts = describe("numpy", "numba")
    columns = ["what", "overflow_rate", "repeat", "seconds", "times_one_by_one"]
    with (RESULTS / "simulate.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *facts])
        for what, rate, repeat, seconds, ratio in rows:
            writer.writerow(
                [what, rate, repeat, f"{seconds:.2f}", ratio, *facts.values()]
            )
            print(f"{what:10} rate {rate:<7} {seconds:6.2f} s  {ratio}")


if __name__ == "__main__":
    main()
