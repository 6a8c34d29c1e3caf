# SPDX-License-Identifier: Apache-2.0
"""What does each policy skip, lose and reach? Four float16 models, three seeds.

Writes results/policies.csv, a row for each run: skipped steps, updates in the first 100
steps, the fraction of gradient values lost to underflow, the mean training loss of the
last 20 steps. Runs have 300 steps, so every rule grows after 20 finite steps, as in
`lossscale demo`; "Dynamic, 2000" is torch's default, which does not grow in them.

    python benchmarks/policies.py            runs, and writes rows as they come
    python benchmarks/policies.py --table    the means, from the file
"""

import csv
import sys
from collections import defaultdict

import numpy as np
from machine import RESULTS, describe

from lossscale import (
    AutoStart,
    Dynamic,
    Fixed,
    Headroom,
    Histogram,
    LogMax,
    OverflowRate,
    RisingFloor,
    Saturation,
    WindowFollowsScale,
)

SEEDS = 3
RULE = Dynamic(growth_interval=20)

POLICIES = {
    "no scaling": Fixed(1.0),
    "Fixed(4096)": Fixed(4096.0),
    "Dynamic, 2000": Dynamic(),
    "Dynamic": RULE,
    "AutoStart": AutoStart(RULE),
    "Headroom": Headroom(RULE),
    "LogMax": LogMax(RULE),
    "Histogram": Histogram(RULE),
    "Saturation": Saturation(RULE, doubling=20),
    "OverflowRate": OverflowRate(RULE),
    "WindowFollowsScale": WindowFollowsScale(RULE),
    "RisingFloor": RisingFloor(RULE, floors=((100, 256.0), (200, 1024.0))),
}

COLUMNS = ["skipped", "first_updates", "lost", "final_loss", "final_scale"]
FILE = RESULTS / "policies.csv"


def main() -> None:
    import float16_models  # JAX, which a table does not need

    facts = describe("numpy", "jax")
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "policy", "seed", *COLUMNS, *facts])
        for name, kind in float16_models.MODELS.items():
            model = kind()
            for seed in range(SEEDS):
                for label, policy in POLICIES.items():
                    outcome = float16_models.run(model, policy, seed)
                    values = [getattr(outcome, column) for column in COLUMNS]
                    values = [f"{x:.6g}" if isinstance(x, float) else x for x in values]
                    writer.writerow([name, label, seed, *values, *facts.values()])
                    file.flush()
    print_table()


def print_table() -> None:
    """Print the means over seeds, as a table of Markdown."""
    rows = defaultdict(list)
    with FILE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            numbers = [float(row[column]) for column in COLUMNS[:4]]
            rows[row["model"], row["policy"]].append(numbers)
    print("| model | policy | skipped | first 100 | lost | final loss (spread) |")
    print("|---|---|---|---|---|---|")
    for (model, policy), runs in rows.items():
        skipped, first, lost, loss = np.mean(runs, axis=0)
        spread = np.ptp([one[3] for one in runs])
        print(
            f"| {model} | {policy} | {skipped:.1f} | {first:.1f} | {lost:.2%} | "
            f"{loss:.5f} ({spread:.5f}) |"
        )


if __name__ == "__main__":
    print_table() if "--table" in sys.argv else main()
