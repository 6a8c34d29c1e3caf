# SPDX-License-Identifier: Apache-2.0
"""How long do a million steps of a hundred policies take? When is compiling worth it?

In seconds of CPU time, which other processes change less than the time on the wall:
the command as a person runs it (start, imports and compilation included); in fresh
processes the import of numba with the compilation (`compile`); steps that Python takes
(`plain`); and compiled ones for several rates of overflow. `worth_compiling` is how
many plain steps take as long as compiling does: `WORTH_COMPILING` in
`lossscale.diagnostics.simulation`. Writes results/simulate.csv.
"""

import csv
import resource
import subprocess
import sys
import time

import numpy as np
from machine import RESULTS, describe

from lossscale import Dynamic, presets
from lossscale.diagnostics import simulate
from lossscale.diagnostics.simulation import WORTH_COMPILING

STEPS, POLICIES = 1_000_000, 100
RATES = (0.0005, 0.01, 0.5)
REPEATS = 3
COMPILE = """
import time, numpy as np
from lossscale import Dynamic
from lossscale.diagnostics import simulation
simulation.WORTH_COMPILING = 0
start = time.process_time()
simulation.simulate([Dynamic()], np.ones(10, np.bool_))
print(time.process_time() - start)
"""


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
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, **silent)  # noqa: S603
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compile_seconds() -> float:
    """Time numba's import and the compilation, in a process of its own."""
    command = [sys.executable, "-c", COMPILE]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return float(printed.stdout)


def seconds_of(policies: list[Dynamic], flags: np.ndarray) -> float:
    start = time.process_time()
    simulate(policies, flags)
    return time.process_time() - start


def main() -> None:
    rows = [("command", 0.001, n, command_seconds(), "") for n in range(REPEATS)]
    rng = np.random.default_rng(0)
    few = rng.random(WORTH_COMPILING // 2) >= 0.001
    for repeat in range(REPEATS):
        compiling, plain = compile_seconds(), seconds_of([Dynamic()], few)
        rows.append(("compile", "", repeat, compiling, ""))
        worth = compiling / plain * few.size
        rows.append(("plain", 0.001, repeat, plain, f"{worth:.0f}"))
        per_plain_step = plain / few.size
    policies = hundred()
    seconds_of(policies[:3], np.ones(STEPS, np.bool_))  # compile
    for rate in RATES:
        flags = np.random.default_rng(0).random(STEPS) >= rate
        rows += [
            ("compiled", rate, repeat, seconds_of(policies, flags), "")
            for repeat in range(REPEATS)
        ]
    fast = rows[-1][3] / STEPS / POLICIES
    print(f"a plain step takes {per_plain_step / fast:.0f} times a compiled one")
    facts = describe("numpy", "numba")
    columns = ["what", "overflow_rate", "repeat", "cpu_seconds", "worth_compiling"]
    with (RESULTS / "simulate.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *facts])
        for what, rate, repeat, seconds, worth in rows:
            writer.writerow(
                [what, rate, repeat, f"{seconds:.2f}", worth, *facts.values()]
            )
            print(f"{what:10} rate {rate:<7} {seconds:6.2f} s  {worth}")


if __name__ == "__main__":
    main()
